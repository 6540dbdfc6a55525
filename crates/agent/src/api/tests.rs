//! The API over a core in memory: limits, errors, and that nobody stalls anybody.

use std::fs;
use std::io;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use flowloom_api::v1::ErrorCode;
use flowloom_api::{Client, ClientError};

use super::*;
use crate::tests::Running;

const DOCUMENT: &str = "version: 1\nnodes: [{name: n1, address: 192.0.2.1}]\nvpcs: [{name: red, vni: 7}]\n";

struct Served(Running);

impl Served {
    fn start(limits: config::Api) -> Self {
        Self(Running::start(
            DOCUMENT,
            |_| (),
            |runtime, dir, _, core, stopped| {
                let socket = runtime.block_on(async { bind(&dir.join("s")) }).unwrap();
                runtime.spawn(serve(socket, core, limits, stopped));
            },
        ))
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.dir.path().join("s")
    }

    fn client(&self) -> Client {
        Client::new(self.path())
    }
}

fn raw(path: &Path, request: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(request).unwrap();
    stream
}

fn answer(mut stream: UnixStream) -> String {
    let mut text = Vec::new();
    // A reset after the answer is how a refused body ends.
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn quick() -> config::Api {
    config::Api { header_seconds: 1, ..config::Api::default() }
}

#[test]
fn slow_clients_stall_nobody_and_are_shown_the_door() {
    let served = Served::start(quick());
    let heads: Vec<_> =
        (0..50).map(|_| raw(&served.path(), b"GET /v1/health HTTP/1.1\r\nhost: x\r\n")).collect();
    let bodies: Vec<_> = (0..50)
        .map(|_| raw(&served.path(), b"POST /v1/trace HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"))
        .collect();
    let streams: Vec<_> = (0..50)
        .map(|_| raw(&served.path(), b"GET /v1/events?follow=true HTTP/1.1\r\nhost: x\r\n\r\n"))
        .collect();
    let start = Instant::now();
    served.client().status().unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    for stream in heads {
        // The end of the connection, not a time-out of ours.
        assert_eq!(answer(stream), "");
    }
    for stream in bodies {
        assert!(answer(stream).contains("did not arrive in time"));
    }
    drop(streams);
}

#[test]
fn more_connections_than_allowed_wait_for_a_place() {
    let served = Served::start(config::Api { connections: 2, ..quick() });
    let held: Vec<_> =
        (0..2).map(|_| raw(&served.path(), b"GET /v1/health HTTP/1.1\r\nhost: x\r\n")).collect();
    served.client().health().unwrap();
    drop(held);
}

#[test]
fn a_body_that_is_too_large_is_refused_before_it_is_read() {
    let served = Served::start(config::Api::default());
    let head = b"POST /v1/trace HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n";
    let text = answer(raw(&served.path(), head));
    assert!(text.starts_with("HTTP/1.1 413") && text.contains("TooLarge"), "{text}");
}

#[test]
fn errors_are_typed() {
    let served = Served::start(config::Api::default());
    let code = |r: Result<(), ClientError>| r.unwrap_err().code();
    let client = served.client();
    assert_eq!(code(client.endpoint("red", "nobody").map(drop)), Some(ErrorCode::NotFound));
    assert_eq!(code(client.endpoint("red", "NOT A NAME").map(drop)), Some(ErrorCode::InvalidRequest));
    let wait = client.policy_wait(None, None, Some(9), Duration::from_millis(50));
    assert_eq!(code(wait.map(drop)), Some(ErrorCode::Timeout));
    client.policy_wait(None, None, Some(1), Duration::from_secs(5)).unwrap();
    for (request, wanted) in [
        ("GET /v1/nothing", "UnknownPath"),
        ("DELETE /v1/health", "MethodNotAllowed"),
        ("GET /v1/conntrack?colour=red", "InvalidRequest"),
        ("GET /v1/policy/entries?vpc=red", "InvalidRequest"),
    ] {
        let text = answer(raw(
            &served.path(),
            format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes(),
        ));
        assert!(text.contains(&format!("\"code\":\"{wanted}\"")), "{request}: {text}");
    }
}

#[test]
fn the_socket_is_the_owners_and_a_live_one_is_never_replaced() {
    let served = Served::start(config::Api::default());
    assert_eq!(fs::metadata(served.path()).unwrap().permissions().mode() & 0o777, 0o600);
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let again = other.block_on(async { bind(&served.path()).map(drop) });
    assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    let file = served.0.dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(
        other.block_on(async { bind(&file).map(drop) }).unwrap_err().kind(),
        io::ErrorKind::AlreadyExists
    );
    assert_eq!(fs::read(&file).unwrap(), b"x");
    // A socket whose owner died is.
    let dead = served.0.dir.path().join("dead");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    other.block_on(async { bind(&dead).map(drop) }).unwrap();
}
