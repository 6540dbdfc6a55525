//! A way to a lab's API server: `kubectl proxy`, which has the administrator's certificate, on a Unix socket. One request per connection.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use flowloom_lab::{Lab, wait};
use flowloom_testkit::{Cmd, Process};
use serde_json::Value;

pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// See the module's comment. Shall not outlive its lab.
pub(super) struct Api {
    _proxy: Process,
    socket: PathBuf,
}

impl Api {
    /// Starts the proxy and waits until it listens.
    pub(super) fn open(lab: &Lab) -> Result<Self> {
        let socket = lab.state().join("api.sock");
        let mut argv = lab.kubectl_argv();
        argv.extend(["proxy".to_owned(), format!("--unix-socket={}", socket.display())]);
        let proxy = Cmd::new(&argv).spawn()?;
        wait::until(PATIENCE, "the way to the API server", || Ok(UnixStream::connect(&socket)?))?;
        Ok(Self { _proxy: proxy, socket })
    }

    /// Status and body.
    pub(super) fn ask(&self, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        exchange(&mut stream, method, path, body)
    }

    /// Adds an object to a collection.
    pub(super) fn create(&self, collection: &str, object: &Value) -> Result<()> {
        let (status, answer) = self.ask("POST", collection, &object.to_string())?;
        ensure!(status == 201, "adding {} to {collection}: {status} {answer}", object["metadata"]["name"]);
        Ok(())
    }

    /// Changes an object's status.
    pub(super) fn say(&self, object: &str, status: &Value) -> Result<()> {
        let body = serde_json::json!({ "status": status }).to_string();
        let (code, answer) = self.ask("PATCH", &format!("{object}/status"), &body)?;
        ensure!(code == 200, "the status of {object}: {code} {answer}");
        Ok(())
    }
}

/// One request on a connection of its own.
pub(super) fn exchange(
    stream: &mut (impl Read + Write),
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    let length = body.len();
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) =
        text.split_once("\r\n\r\n").with_context(|| format!("no answer to {method} {path}"))?;
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).with_context(|| head.to_owned())?;
    Ok((status, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_taken_apart() {
        struct Wire(std::io::Cursor<Vec<u8>>, Vec<u8>);
        impl Read for Wire {
            fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
                self.0.read(buf)
            }
        }
        impl Write for Wire {
            fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
                self.1.write(buf)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut wire =
            Wire(std::io::Cursor::new(b"HTTP/1.0 201 Created\r\nA: b\r\n\r\n{}".to_vec()), Vec::new());
        assert_eq!(exchange(&mut wire, "POST", "/x", "{}").unwrap(), (201, "{}".to_owned()));
        assert!(
            wire.1.starts_with(b"POST /x HTTP/1.0\r\n") && wire.1.ends_with(b"Content-Length: 2\r\n\r\n{}")
        );
        assert!(exchange(&mut Wire(std::io::Cursor::new(Vec::new()), Vec::new()), "GET", "/", "").is_err());
    }
}
