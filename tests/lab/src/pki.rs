//! A certificate authority, and kubeconfigs for everybody.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use serde_json::json;

use crate::addresses;
use crate::files::write_private;

/// The lab's authority; its files are below `pki/`.
pub(crate) struct Authority {
    dir: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes `ca.crt`, `ca.key`, and `sa.key` with `sa.pub` (which sign and prove service-account tokens).
    pub(crate) fn create(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "flowloom lab");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        fs::write(dir.join("ca.crt"), certificate.pem())?;
        write_private(&dir.join("ca.key"), &key.serialize_pem())?;
        let tokens = KeyPair::generate()?;
        write_private(&dir.join("sa.key"), &tokens.serialize_pem())?;
        fs::write(dir.join("sa.pub"), tokens.public_key_pem())?;
        Ok(Self { dir: dir.to_path_buf(), issuer: Issuer::new(params, key) })
    }

    /// Makes `<file>.crt` and `<file>.key` for a user of these groups, who may also be a server by these names.
    pub(crate) fn issue(&self, file: &str, user: &str, group: Option<&str>, names: &[SanType]) -> Result<()> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.subject_alt_names = names.to_vec();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        fs::write(self.dir.join(format!("{file}.crt")), certificate.pem())?;
        write_private(&self.dir.join(format!("{file}.key")), &key.serialize_pem())
    }

    /// The API server's names.
    pub(crate) fn issue_api_server(&self) -> Result<()> {
        let mut names = Vec::new();
        for name in ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"] {
            names.push(SanType::DnsName(name.try_into()?));
        }
        let ips = addresses::API_SERVICE.iter().chain(&["127.0.0.1"]).map(|a| a.parse::<IpAddr>());
        for ip in ips {
            names.push(SanType::IpAddress(ip?));
        }
        names.extend(addresses::control_plane().map(SanType::IpAddress));
        self.issue("apiserver", "kube-apiserver", None, &names)
    }
}

/// How somebody proves who they are.
pub(crate) enum Credential<'a> {
    /// `<file>.crt` and `<file>.key` of the authority.
    Certificate(&'a str),
    /// A service account's token.
    Token(&'a str),
}

/// Writes a kubeconfig (JSON is YAML, too), readable by its owner only.
pub(crate) fn write_kubeconfig(path: &Path, pki: &Path, credential: &Credential<'_>) -> Result<()> {
    let user = match credential {
        Credential::Certificate(file) => json!({
            "client-certificate": pki.join(format!("{file}.crt")),
            "client-key": pki.join(format!("{file}.key")),
        }),
        Credential::Token(token) => json!({ "token": token }),
    };
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": api_server(), "certificate-authority": pki.join("ca.crt")}}],
        "users": [{"name": "lab", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
    });
    write_private(path, &serde_json::to_string_pretty(&config)?)
        .with_context(|| format!("writing {}", path.display()))
}

/// Where the API server listens.
pub(crate) fn api_server() -> String {
    format!("https://{}:6443", addresses::control_plane()[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_kubeconfigs_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let dir = flowloom_testkit::temp_dir("pki").unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        authority.issue("admin", "admin", Some("system:masters"), &[]).unwrap();
        authority.issue_api_server().unwrap();
        let config = dir.path().join("admin.kubeconfig");
        write_kubeconfig(&config, dir.path(), &Credential::Certificate("admin")).unwrap();
        for name in ["ca.key", "sa.key", "admin.key", "apiserver.key", "admin.kubeconfig"] {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{name}: {mode:o}");
        }
        let read: serde_json::Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
        assert_eq!(read["clusters"][0]["cluster"]["server"], "https://192.168.71.10:6443");
    }
}
