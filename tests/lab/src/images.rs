//! The images that Pods of the lab run, from programs built here and the host's own, under the names they are asked by.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use flowloom_testkit::Cmd;

use crate::oci::{self, Layer, Run};
use crate::{paths, programs};

/// The sandbox image.
pub const PAUSE: &str = "localhost/pause:1";
/// `BusyBox` with all its applets in `/bin`.
pub const BUSYBOX: &str = "localhost/busybox:1";

const E2E: &str = "registry.k8s.io/e2e-test-images";

/// Programs of the host that tests run in Pods; `BusyBox` is the rest.
const TOOLS: &[&str] = &[
    "bash",
    "dash",
    "curl",
    "getent",
    "wget",
    "dig",
    "nslookup",
    "host",
    "nc.openbsd",
    "ip",
    "ss",
    "ping",
    "conntrack",
    "iperf",
    "nft",
    "xtables-nft-multi",
];

/// Makes the images every lab has, then those of the suites when asked for; keeps what is up to date.
///
/// # Errors
/// When a program is missing; the message names it.
pub fn build(suites: bool) -> Result<()> {
    fs::create_dir_all(paths::images())?;
    let lock = fs::File::create(paths::images().join(".lock"))?;
    // Tests that run side by side want the same archives.
    lock.lock()?;
    up_to_date("pause", &[], pause)?;
    up_to_date("busybox", &[which("busybox")?], busybox)?;
    if suites {
        let program = |name: &str| paths::programs().join(name);
        let mut inputs: Vec<_> = TOOLS.iter().map(|t| which(t)).collect::<Result<_>>()?;
        inputs.extend(["agnhost", "coredns", "cyclonus-worker"].map(program));
        up_to_date("agnhost", &inputs, agnhost)?;
        up_to_date("tools", &inputs, tools)?;
        up_to_date("coredns", &[program("coredns")], coredns)?;
        up_to_date("stray-segments", &[program("regression-issue-74839")], stray_segments)?;
    }
    Ok(())
}

/// The archives a lab loads: all of them, or without the suites'.
pub(crate) fn archives(suites: bool) -> Vec<PathBuf> {
    let mut names = vec!["pause", "busybox"];
    if suites {
        names.extend(["agnhost", "tools", "coredns", "stray-segments"]);
    }
    names.iter().map(|n| archive(n)).collect()
}

fn archive(name: &str) -> PathBuf {
    paths::images().join(format!("{name}.tar"))
}

/// An image is made again when this source, its names or a program in it changed.
fn up_to_date(name: &str, inputs: &[PathBuf], make: fn(&Path) -> Result<()>) -> Result<()> {
    let mut text = oci::digest(include_bytes!("images.rs")) + &oci::digest(include_bytes!("oci.rs"));
    for input in inputs {
        let meta = fs::metadata(input).with_context(|| format!("{} is not built", input.display()))?;
        text += &format!(" {} {} {:?}", input.display(), meta.len(), meta.modified()?);
    }
    let stamp = oci::digest(text.as_bytes());
    let stamp_file = paths::images().join(format!(".{name}.stamp"));
    if archive(name).exists() && fs::read_to_string(&stamp_file).is_ok_and(|s| s == stamp) {
        return Ok(());
    }
    make(&archive(name)).with_context(|| format!("image {name}"))?;
    println!("image {name}: {} MiB", fs::metadata(archive(name))?.len() >> 20);
    Ok(fs::write(stamp_file, stamp)?)
}

fn pause(to: &Path) -> Result<()> {
    let mut layer = Layer::new();
    layer.file("pause", 0o755, &compile("pause.c")?)?;
    let names =
        [PAUSE, "registry.k8s.io/pause:3.10.2", "registry.k8s.io/pause:3.10.1", "registry.k8s.io/pause:3.10"];
    oci::write(
        to,
        &names,
        &Run { entrypoint: &["/pause"], user: "65535:65535", ..Run::default() },
        vec![layer],
    )
}

fn busybox(to: &Path) -> Result<()> {
    let mut layer = Layer::new();
    base(&mut layer)?;
    applets(&mut layer)?;
    layer.file("www/index.html", 0o644, b"served by BusyBox\n")?;
    let latest = "docker.io/library/busybox:latest";
    let names = [BUSYBOX, &format!("{E2E}/busybox:1.37.0-1"), latest];
    oci::write(to, &names, &Run { command: &["sh"], ..Run::default() }, vec![layer])
}

/// Upstream's server and client of nearly every network test, with the tools tests run beside it.
fn agnhost(to: &Path) -> Result<()> {
    let mut layer = toolbox()?;
    layer.copy(&paths::programs().join("agnhost"), "agnhost.upstream", 0o755)?;
    layer.file("agnhost", 0o755, &compile("without_sctp.c")?)?;
    layer.link("agnhost-2", "agnhost")?;
    layer.copy(&paths::programs().join("coredns"), "coredns", 0o755)?;
    layer.copy(&paths::programs().join("cyclonus-worker"), "worker", 0o755)?;
    let porter = programs::kubernetes_source()?.join("test/images/agnhost/porter");
    for file in ["localhost.crt", "localhost.key"] {
        layer.copy(&porter.join(file), file, 0o644)?;
    }
    layer.dir("uploads", 0o755)?;
    // One content under every name that suites ask for: 2.63.0 and 2.55 Kubernetes 1.36, the last one the policy prober.
    let names = [
        format!("{E2E}/agnhost:2.63.0"),
        format!("{E2E}/agnhost:2.55"),
        "docker.io/mfenwick100/cyclonus-worker:latest".to_owned(),
    ];
    let run = Run { entrypoint: &["/agnhost"], command: &["pause"], ..Run::default() };
    oci::write(to, &names.each_ref().map(String::as_str), &run, vec![layer])
}

/// The tools alone, under the other names they serve for. The web server stands in where a test only wants a port.
fn tools(to: &Path) -> Result<()> {
    let mut layer = toolbox()?;
    layer.file("www/index.html", 0o644, b"served by BusyBox\n")?;
    layer.file("usr/local/bin/web-server", 0o755, b"#!/bin/sh\nexec busybox httpd -f -p 80 -h /www\n")?;
    let names = [
        format!("{E2E}/glibc-dns-testing:2.0.0"),
        "registry.k8s.io/build-image/distroless-iptables:v0.9.6".to_owned(),
        format!("{E2E}/nginx:1.15-4"),
        format!("{E2E}/nginx:1.27-0"),
    ];
    let run = Run { command: &["web-server"], ..Run::default() };
    oci::write(to, &names.each_ref().map(String::as_str), &run, vec![layer])
}

fn coredns(to: &Path) -> Result<()> {
    let mut layer = Layer::new();
    layer.copy(&paths::programs().join("coredns"), "coredns", 0o755)?.dir("tmp", 0o1777)?;
    let run = Run { entrypoint: &["/coredns"], ..Run::default() };
    oci::write(to, &["registry.k8s.io/coredns/coredns:v1.14.2", "localhost/coredns:1"], &run, vec![layer])
}

/// A server of one conntrack test: it sends segments outside the window.
fn stray_segments(to: &Path) -> Result<()> {
    let mut layer = Layer::new();
    layer.copy(&paths::programs().join("regression-issue-74839"), "regression-issue-74839", 0o755)?;
    let run = Run { entrypoint: &["/regression-issue-74839"], ..Run::default() };
    oci::write(to, &[&format!("{E2E}/regression-issue-74839:1.4")], &run, vec![layer])
}

fn base(layer: &mut Layer) -> Result<()> {
    for (link, target) in
        [("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")]
    {
        layer.dir(target, 0o755)?.link(link, target)?;
    }
    layer.dir("tmp", 0o1777)?.dir("root", 0o700)?.dir("var/tmp", 0o1777)?.dir("home", 0o755)?;
    let passwd = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33::/var/www:/bin/false\n\
        user-defined-in-image:x:1000:1000::/home:/bin/sh\nnobody:x:65534:65534::/home:/bin/false\n";
    let group = "root:x:0:\nwww-data:x:33:\nuser-defined-in-image:x:1000:\n\
        group-defined-in-image:x:50000:user-defined-in-image\nnogroup:x:65534:\n";
    layer.file("etc/passwd", 0o644, passwd.as_bytes())?.file("etc/group", 0o644, group.as_bytes())?;
    layer.file("etc/nsswitch.conf", 0o644, b"hosts: files dns\n")?;
    Ok(())
}

/// `BusyBox` for every name that is not there yet.
fn applets(layer: &mut Layer) -> Result<()> {
    let busybox = which("busybox")?;
    layer.copy(&busybox, "usr/bin/busybox", 0o755)?;
    let list = Cmd::new(&[busybox.display().to_string(), "--list".into()]).run()?.success()?;
    for applet in list.stdout.lines() {
        if !layer.has(&format!("usr/sbin/{applet}")) {
            layer.link(&format!("usr/bin/{applet}"), "busybox")?;
        }
    }
    Ok(())
}

/// The host's tools with the libraries they name, the rest from `BusyBox`.
fn toolbox() -> Result<Layer> {
    let mut layer = Layer::new();
    base(&mut layer)?;
    let mut files = BTreeSet::new();
    for tool in TOOLS {
        let path = which(tool)?;
        files.extend(libraries(&path)?);
        files.insert(path);
    }
    for file in &files {
        let path = file.to_string_lossy();
        let inside = if path.starts_with("/usr/") { path.to_string() } else { format!("/usr{path}") };
        layer.copy(file, &inside, 0o755)?;
    }
    layer.link("usr/bin/nc", "nc.openbsd")?.link("usr/bin/sh", "dash")?;
    for name in
        ["iptables", "ip6tables"].iter().flat_map(|n| ["", "-save", "-restore"].map(|s| format!("{n}{s}")))
    {
        layer.link(&format!("usr/sbin/{name}"), "xtables-nft-multi")?;
    }
    // The suite reads the CSV of iperf 2.2: a header, then 17 fields. 2.1 prints 9, the interval as one of them.
    layer.file("usr/local/bin/iperf", 0o755, include_bytes!("../images/iperf.sh"))?;
    applets(&mut layer)?;
    Ok(layer)
}

/// What the dynamic loader would load, itself included.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let out = Cmd::new(&["ldd".to_owned(), program.display().to_string()]).run()?;
    let paths = out.stdout.split_whitespace().filter(|w| w.starts_with('/')).map(PathBuf::from);
    Ok(paths.filter(|p| p.exists()).collect())
}

fn which(program: &str) -> Result<PathBuf> {
    let dirs = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
    let found = dirs.iter().map(|d| Path::new(d).join(program)).find(|p| p.exists());
    found.with_context(|| format!("program {program} is missing: run scripts/setup.sh --k8s"))
}

fn compile(source: &str) -> Result<Vec<u8>> {
    let dir = flowloom_testkit::temp_dir("compile")?;
    let (from, to) = (paths::source().join("images").join(source), dir.path().join("out"));
    let argv = ["gcc", "-Os", "-Wall", "-Werror", "-static", "-s", "-o"].map(str::to_owned);
    let argv = [&argv[..], &[to.display().to_string(), from.display().to_string()]].concat();
    Cmd::new(&argv).run()?.success()?;
    let bytes = fs::read(&to)?;
    ensure!(!bytes.is_empty(), "gcc wrote nothing");
    Ok(bytes)
}
