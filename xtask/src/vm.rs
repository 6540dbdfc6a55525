//! Kernel tests on another kernel than this machine's: the oldest that the agent takes, in a virtual machine without
//! hardware support, so that it runs anywhere. Nothing is installed: kernel and emulator are unpacked below the cache.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{again, bpf, run};

/// Debian's packages of that kernel, newest first by their numbers.
const KERNEL: &str = "^linux-image-6\\.12\\..*-cloud-amd64$";
/// The emulator of bookworm itself (7.2) loses compare-and-exchange of 16 bytes now and then, which ends guests at random.
const EMULATOR: &[&str] = &["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];
const SUITE: &str = "bookworm-backports";
/// Test programs: what the verifier says of every program, and packets on a node, between nodes and with answers of our own.
const TESTS: &[&str] = &["budget", "same_node", "cross_node", "answers"];
/// What they start, and what the guest starts them with.
const TOOLS: &[&str] = &["ip", "nft", "ping", "sysctl", "kmod", "busybox"];
const MODULES: &[&str] = &[
    "veth",
    "vxlan",
    "bridge",
    "br_netfilter",
    "nf_tables",
    "nft_ct",
    "nft_masq",
    "nft_chain_nat",
    "nft_reject_inet",
    "nf_conntrack",
    "sch_ingress",
    "cls_bpf",
    "sctp",
    "udp_diag",
    "tcp_diag",
];
/// An emulated processor takes 3 to 30 times as long; most of it is the verifier.
const LIMIT_SECONDS: &str = "5400";

/// Where the guest's files lie while its image is packed, and what of the host they come from.
struct Image {
    root: PathBuf,
}

pub(crate) fn tier() -> Result<Vec<String>> {
    bpf::build()?;
    let dir = cache()?;
    let packages = Packages::open(&dir)?;
    let kernel = packages.unpacked(&[packages.newest(KERNEL)?.as_str()], "kernel")?;
    let emulator = packages.unpacked(EMULATOR, "emulator")?;
    let image = Image::new(dir.join("image"))?;
    for tool in TOOLS {
        image.add(&which(tool)?, &format!("/usr/bin/{tool}"))?;
    }
    image.modules(&kernel)?;
    for program in test_programs()? {
        let name = program.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
        image.add(&program, &format!("/tests/{name}"))?;
    }
    image.script("/init", &init())?;
    let initrd = image.pack(&dir.join("initrd"))?;
    let output = boot(&emulator, &kernel, &initrd)?;
    let ended = output.lines().filter(|l| l.starts_with("guest: ")).map(str::trim).collect::<Vec<_>>();
    let wanted: Vec<String> = TESTS.iter().map(|t| format!("guest: {t} ended with 0")).collect();
    ensure!(ended == wanted, "the guest said {ended:?}, and not {wanted:?}");
    Ok(Vec::new())
}

fn cache() -> Result<PathBuf> {
    let home = std::env::var_os("HOME").context("HOME is not set")?;
    let dir = Path::new(&home).join(".cache/flowloom/vm");
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

fn which(tool: &str) -> Result<PathBuf> {
    let dirs = ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(|d| Path::new(d).join(tool));
    let found = dirs.into_iter().find(|p| p.is_file());
    found.with_context(|| format!("no {tool}: run `scripts/setup.sh --vm`"))
}

/// Debian's packages by lists of our own: the machine's sources stay as they are.
struct Packages {
    dir: PathBuf,
    options: Vec<String>,
}

impl Packages {
    fn open(dir: &Path) -> Result<Self> {
        let apt = dir.join("apt");
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.join(sub))?;
        }
        let list = apt.join("sources.list");
        let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
        fs::write(&list, format!("deb [signed-by={key}] http://deb.debian.org/debian {SUITE} main\n"))?;
        let apt = apt.display();
        let options = [
            format!("Dir::Etc::SourceList={}", list.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={apt}/lists"),
            format!("Dir::Cache={apt}/cache"),
            "APT::Sandbox::User=root".to_owned(),
        ];
        let packages = Self { dir: dir.to_owned(), options: options.into() };
        run::succeed(packages.apt("apt-get").args(["-q", "-q", "update"]))?;
        Ok(packages)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = run::command(program, &[]);
        command.args(self.options.iter().flat_map(|o| ["-o", o]));
        command
    }

    /// The package with the highest numbers in its name.
    fn newest(&self, pattern: &str) -> Result<String> {
        let list = run::output(self.apt("apt-cache").args(["search", "--names-only", pattern]))?;
        newest(&list).with_context(|| format!("no package {pattern} in {SUITE}"))
    }

    /// Unpacked once; a folder that is there is whole.
    fn unpacked(&self, names: &[&str], folder: &str) -> Result<PathBuf> {
        let target = self.dir.join(format!("{folder}-{}", names[0]));
        if target.is_dir() {
            return Ok(target);
        }
        let partial = target.with_extension("partial");
        let _ = fs::remove_dir_all(&partial);
        let downloads = partial.join("downloads");
        fs::create_dir_all(&downloads)?;
        let mut download = self.apt("apt-get");
        run::succeed(download.args(["-q", "-q", "download"]).args(names).current_dir(&downloads))?;
        for package in fs::read_dir(&downloads)? {
            run::succeed(run::command("dpkg", &["-x"]).arg(package?.path()).arg(&partial))?;
        }
        fs::remove_dir_all(&downloads)?;
        fs::rename(&partial, &target)?;
        Ok(target)
    }
}

/// Of lines `NAME - description`.
fn newest(list: &str) -> Option<String> {
    let numbers = |name: &&str| -> Vec<u64> {
        let version = name.trim_end_matches("-amd64");
        version.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    list.lines().filter_map(|l| l.split(' ').next()).max_by_key(numbers).map(str::to_owned)
}

impl Image {
    fn new(root: PathBuf) -> Result<Self> {
        let _ = fs::remove_dir_all(&root);
        for dir in ["proc", "sys", "dev", "tmp", "run", "root", "var/tmp", "etc", "bin", "sbin", "usr/bin"] {
            fs::create_dir_all(root.join(dir))?;
        }
        symlink("/usr/bin/kmod", root.join("sbin/modprobe"))?;
        symlink("/run", root.join("var/run"))?;
        Ok(Self { root })
    }

    fn place(&self, inside: &str) -> Result<PathBuf> {
        let path = self.root.join(inside.trim_start_matches('/'));
        fs::create_dir_all(path.parent().context("no parent")?)?;
        Ok(path)
    }

    /// A program and the libraries that it names.
    fn add(&self, program: &Path, inside: &str) -> Result<()> {
        fs::copy(program, self.place(inside)?).with_context(|| format!("copying {}", program.display()))?;
        // What is linked statically makes `ldd` fail.
        let libraries = Command::new("ldd").arg(program).output()?.stdout;
        for library in String::from_utf8(libraries)?.split_whitespace().filter(|w| w.starts_with('/')) {
            let target = self.place(library)?;
            if !target.exists() {
                fs::copy(library, target).with_context(|| format!("copying {library}"))?;
            }
        }
        Ok(())
    }

    fn script(&self, inside: &str, text: &str) -> Result<()> {
        let path = self.place(inside)?;
        fs::write(&path, text)?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
    }

    /// Modules with what they need, and an index of just these.
    fn modules(&self, kernel: &Path) -> Result<()> {
        let release = release(kernel)?;
        let base = kernel.display().to_string();
        run::succeed(&mut run::command("depmod", &["-b", &base, &release]))?;
        for module in MODULES {
            let show = ["-C", "/dev/null", "-d", &base, "-S", &release, "--show-depends", module];
            let list = run::output(&mut run::command("modprobe", &show))?;
            for file in list.lines().filter_map(|l| l.strip_prefix("insmod ")).map(str::trim) {
                let inside =
                    file.strip_prefix(&base).with_context(|| format!("{file} is not below {base}"))?;
                fs::copy(file, self.place(inside)?)?;
            }
        }
        for index in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
            let inside = format!("/lib/modules/{release}/{index}");
            fs::copy(kernel.join(&inside[1..]), self.place(&inside)?)?;
        }
        run::succeed(run::command("depmod", &["-b"]).arg(&self.root).arg(&release))
    }

    fn pack(&self, target: &Path) -> Result<PathBuf> {
        let list = run::output(Command::new("find").arg(".").current_dir(&self.root))?;
        let names = target.with_extension("list");
        fs::write(&names, list)?;
        let archive = ["-o", "-H", "newc", "--quiet", "-F"];
        run::succeed(
            Command::new("cpio")
                .args(archive)
                .arg(target)
                .current_dir(&self.root)
                .stdin(fs::File::open(&names)?),
        )?;
        Ok(target.to_owned())
    }
}

fn release(kernel: &Path) -> Result<String> {
    let mut entries = fs::read_dir(kernel.join("lib/modules"))?;
    let entry = entries.next().context("no modules")??;
    entry.file_name().into_string().map_err(|name| anyhow::anyhow!("{name:?} is no name"))
}

/// The newest test program of each name, as cargo tells.
fn test_programs() -> Result<Vec<PathBuf>> {
    let mut args =
        vec!["test", "--locked", "--no-run", "--message-format=json", "-p", "flowloom-tests-netns"];
    args.extend(TESTS.iter().flat_map(|t| ["--test", t]));
    let mut programs = Vec::new();
    for line in run::output(&mut run::command(&run::cargo(), &args))?.lines() {
        let message: serde_json::Value = serde_json::from_str(line)?;
        // Cargo builds the crate's other programs, too.
        if let Some(program) = message["executable"].as_str().filter(|_| message["profile"]["test"] == true) {
            programs.push(PathBuf::from(program));
        }
    }
    ensure!(programs.len() == TESTS.len(), "cargo made {programs:?} of {TESTS:?}");
    Ok(programs)
}

/// The guest's first process.
fn init() -> String {
    let mut text = "#!/usr/bin/busybox sh
/usr/bin/busybox --install -s /bin
export PATH=/usr/bin:/bin:/sbin HOME=/root RUST_BACKTRACE=0
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
mount -t tmpfs t /tmp; mount -t tmpfs t /run; mkdir -p /run/netns
mount -t bpf b /sys/fs/bpf; mount -t cgroup2 c /sys/fs/cgroup
echo 3 > /proc/sys/kernel/printk
ip link set lo up
uname -r
"
    .to_owned();
    for test in TESTS {
        text.push_str(&format!(
            "echo '== {test}'; /tests/{test} --test-threads 1; echo \"guest: {test} ended with $?\"\n"
        ));
    }
    text.push_str("poweroff -f\n");
    text
}

fn boot(emulator: &Path, kernel: &Path, initrd: &Path) -> Result<String> {
    let release = release(kernel)?;
    let data = emulator.join("usr/share");
    let mut command = Command::new("timeout");
    command.arg(LIMIT_SECONDS).arg(emulator.join("usr/bin/qemu-system-x86_64"));
    for dir in ["qemu", "seabios"] {
        command.arg("-L").arg(data.join(dir));
    }
    // The machine's firmware links to files of packages that are not unpacked; its own copies do as well.
    command.args(["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]);
    command.args([
        "-M",
        "q35",
        "-accel",
        "tcg,thread=single",
        "-cpu",
        "max,la57=off",
        "-smp",
        "2",
        "-m",
        "3G",
    ]);
    command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
    command.arg("-kernel").arg(kernel.join(format!("boot/vmlinuz-{release}")));
    command.arg("-initrd").arg(initrd);
    command.args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"]);
    let (success, output) = again::shown(command.stdin(std::process::Stdio::null()))?;
    if success { Ok(output) } else { bail!("{command:?} failed") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_package_is_the_one_with_the_highest_numbers() {
        let list = "linux-image-6.12.9+deb12-cloud-amd64 - Linux\nlinux-image-6.12.90+deb12.1-cloud-amd64 - Linux\n\
                    linux-image-6.12.90+deb12-cloud-amd64 - Linux\n";
        assert_eq!(newest(list).as_deref(), Some("linux-image-6.12.90+deb12.1-cloud-amd64"));
        assert_eq!(newest(""), None);
    }
}
