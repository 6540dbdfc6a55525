//! OCI image archives (image-spec 1.1), written by hand: no registry, no daemon. The same input gives the same bytes.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Cursor, Read};
use std::path::{Component, Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

/// One layer in the making: an uncompressed tar, so that its digest is its diff id and importing is quick.
pub(crate) struct Layer {
    tar: Builder<Vec<u8>>,
    known: BTreeSet<String>,
}

impl Layer {
    pub(crate) fn new() -> Self {
        Self { tar: Builder::new(Vec::new()), known: BTreeSet::new() }
    }

    /// Whether a path is in it already.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.known.contains(&relative(path))
    }

    pub(crate) fn dir(&mut self, path: &str, mode: u32) -> Result<&mut Self> {
        let path = relative(path);
        self.parents(&path)?;
        if self.known.insert(path.clone()) {
            self.append(EntryType::Directory, &format!("{path}/"), mode, None, &[])?;
        }
        Ok(self)
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<&mut Self> {
        let path = relative(path);
        self.parents(&path)?;
        if self.known.insert(path.clone()) {
            self.append(EntryType::Regular, &path, mode, None, content)?;
        }
        Ok(self)
    }

    /// A file of the host under a path of its own.
    pub(crate) fn copy(&mut self, from: &Path, path: &str, mode: u32) -> Result<&mut Self> {
        let content = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        self.file(path, mode, &content)
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) -> Result<&mut Self> {
        let path = relative(path);
        self.parents(&path)?;
        if self.known.insert(path.clone()) {
            self.append(EntryType::Symlink, &path, 0o777, Some(target), &[])?;
        }
        Ok(self)
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        let mut at = String::new();
        for part in path.split('/').rev().skip(1).collect::<Vec<_>>().into_iter().rev() {
            at = if at.is_empty() { part.to_owned() } else { format!("{at}/{part}") };
            if self.known.insert(at.clone()) {
                self.append(EntryType::Directory, &format!("{at}/"), 0o755, None, &[])?;
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        kind: EntryType,
        path: &str,
        mode: u32,
        link: Option<&str>,
        content: &[u8],
    ) -> Result<()> {
        append(&mut self.tar, kind, path, mode, link, content)
    }
}

/// What a container of the image runs.
#[derive(Debug, Default, Clone)]
pub(crate) struct Run<'a> {
    pub(crate) entrypoint: &'a [&'a str],
    pub(crate) command: &'a [&'a str],
    pub(crate) user: &'a str,
}

/// Writes an archive that holds one image under these full names.
pub(crate) fn write(to: &Path, names: &[&str], run: &Run<'_>, layers: Vec<Layer>) -> Result<()> {
    let mut blobs = Vec::new();
    let mut diff_ids = Vec::new();
    let mut described = Vec::new();
    for layer in layers {
        let bytes = layer.tar.into_inner()?;
        let digest = digest(&bytes);
        diff_ids.push(json!(digest));
        described.push(descriptor("application/vnd.oci.image.layer.v1.tar", &digest, bytes.len()));
        blobs.push((digest, bytes));
    }
    let platform = json!({"architecture": architecture(), "os": "linux"});
    let config = serde_json::to_vec(&json!({
        "architecture": architecture(), "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": run.entrypoint, "Cmd": run.command, "User": run.user,
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }))?;
    let config_digest = digest(&config);
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config_digest, config.len()),
        "layers": described,
    }))?;
    let manifest_digest = digest(&manifest);
    let named = names.iter().map(|name| {
        let mut entry =
            descriptor("application/vnd.oci.image.manifest.v1+json", &manifest_digest, manifest.len());
        entry["platform"] = platform.clone();
        // What `ctr images import` takes as the image's name.
        entry["annotations"] = json!({"io.containerd.image.name": name});
        entry
    });
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": named.collect::<Vec<_>>()}))?;
    blobs.push((config_digest, config));
    blobs.push((manifest_digest, manifest));

    let part = to.with_extension("part");
    let mut archive = Builder::new(std::io::BufWriter::new(fs::File::create(&part)?));
    append(
        &mut archive,
        EntryType::Regular,
        "oci-layout",
        0o644,
        None,
        br#"{"imageLayoutVersion":"1.0.0"}"#,
    )?;
    append(&mut archive, EntryType::Regular, "index.json", 0o644, None, &index)?;
    for (digest, bytes) in &blobs {
        let path = format!("blobs/{}", digest.replace(':', "/"));
        append(&mut archive, EntryType::Regular, &path, 0o644, None, bytes)?;
    }
    archive.into_inner()?.into_inner().map_err(|e| e.into_error())?.sync_all()?;
    fs::rename(&part, to).with_context(|| format!("writing {}", to.display()))
}

fn append<W: std::io::Write>(
    tar: &mut Builder<W>,
    kind: EntryType,
    path: &str,
    mode: u32,
    link: Option<&str>,
    content: &[u8],
) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    if let Some(target) = link {
        tar.append_link(&mut header, path, target)?;
    } else {
        tar.append_data(&mut header, path, Cursor::new(content).take(content.len() as u64))?;
    }
    Ok(())
}

fn descriptor(kind: &str, digest: &str, size: usize) -> Value {
    json!({"mediaType": kind, "digest": digest, "size": size})
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

fn relative(path: &str) -> String {
    let parts = Path::new(path).components().filter_map(|c| match c {
        Component::Normal(part) => Some(part.to_string_lossy().into_owned()),
        _ => None,
    });
    parts.collect::<Vec<_>>().join("/")
}

/// As OCI names it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn sample(dir: &Path, name: &str) -> Vec<u8> {
        let mut layer = Layer::new();
        layer.file("/usr/bin/tool", 0o755, b"#!/bin/sh\n").unwrap().link("bin", "usr/bin").unwrap();
        layer.dir("/tmp", 0o1777).unwrap().file("/usr/bin/tool", 0o644, b"first wins").unwrap();
        let to = dir.join(name);
        let run = Run { entrypoint: &["/usr/bin/tool"], ..Run::default() };
        write(&to, &["localhost/a:1", "localhost/b:2"], &run, vec![layer]).unwrap();
        fs::read(to).unwrap()
    }

    #[test]
    fn every_blob_is_what_its_digest_says_and_every_reference_is_there() {
        let dir = flowloom_testkit::temp_dir("oci").unwrap();
        let bytes = sample(dir.path(), "a.tar");
        assert_eq!(bytes, sample(dir.path(), "b.tar"), "the same input gives the same bytes");
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().to_string_lossy().into_owned(), content);
        }
        let blob = |v: &Value| {
            let digest_text = v["digest"].as_str().unwrap();
            let content = &files[&format!("blobs/{}", digest_text.replace(':', "/"))];
            assert_eq!(digest(content), digest_text);
            assert_eq!(v["size"], content.len());
            content.clone()
        };
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let names: Vec<_> = index["manifests"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| &m["annotations"]["io.containerd.image.name"])
            .collect();
        assert_eq!(names, ["localhost/a:1", "localhost/b:2"]);
        let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        let layer = blob(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], digest(&layer));
        let mut paths = Vec::new();
        for entry in tar::Archive::new(layer.as_slice()).entries().unwrap() {
            let entry = entry.unwrap();
            paths
                .push((entry.path().unwrap().to_string_lossy().into_owned(), entry.header().mode().unwrap()));
        }
        let expected =
            [("usr/", 0o755), ("usr/bin/", 0o755), ("usr/bin/tool", 0o755), ("bin", 0o777), ("tmp/", 0o1777)];
        assert_eq!(paths, expected.map(|(p, m)| (p.to_owned(), m)));
    }
}
