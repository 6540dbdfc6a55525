use std::os::unix::net::UnixListener;
use std::thread;

use super::*;

fn serve(answer: &'static [u8], hold: bool) -> (tempfile::TempDir, Client, thread::JoinHandle<Vec<u8>>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (mut c, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        let mut buf = [0; 4096];
        while !got.windows(4).any(|w| w == b"\r\n\r\n") {
            let n = c.read(&mut buf).unwrap();
            got.extend_from_slice(&buf[..n]);
        }
        c.write_all(answer).unwrap();
        if hold {
            // Until the client gives up.
            let _ = c.read(&mut buf);
        }
        got
    });
    (dir, Client::new(path).with_timeout(Duration::from_millis(300)), server)
}

#[test]
fn a_missing_socket_and_503_are_unavailable_and_other_errors_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let missing = Client::new(dir.path().join("none")).health().unwrap_err();
    assert!(missing.is_unavailable(), "{missing}");
    // A socket file that nobody listens on.
    let path = dir.path().join("dead");
    drop(UnixListener::bind(&path).unwrap());
    assert!(Client::new(&path).health().unwrap_err().is_unavailable());

    let (_d, client, _s) =
        serve(b"HTTP/1.1 503 x\r\n\r\n{\"error\":{\"code\":\"NotReady\",\"message\":\"m\"}}", false);
    let e = client.health().unwrap_err();
    assert!(e.is_unavailable() && e.to_string().contains(": m;"), "{e}");

    let (_d, client, _s) =
        serve(b"HTTP/1.1 404 x\r\n\r\n{\"error\":{\"code\":\"NotFound\",\"message\":\"m\"}}", false);
    let e = client.health().unwrap_err();
    assert_eq!((e.is_unavailable(), e.code()), (false, Some(ErrorCode::NotFound)));

    let (_d, client, _s) =
        serve(b"HTTP/1.1 400 x\r\n\r\n{\"error\":{\"code\":\"FromTheFuture\",\"message\":\"m\"}}", false);
    assert_eq!(client.health().unwrap_err().code(), Some(ErrorCode::Other));
}

#[test]
fn a_silent_agent_ends_at_the_deadline() {
    let (_d, client, _s) = serve(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", true);
    let start = Instant::now();
    let e = client.health().unwrap_err();
    assert!(matches!(e, ClientError::Timeout { .. }), "{e}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn requests_carry_filters_as_encoded_query() {
    let (_d, client, server) =
        serve(b"HTTP/1.1 200 OK\r\n\r\n{\"connections\":[],\"truncated\":false}", false);
    let filter = v1::ConntrackFilter {
        vpc: Some("red&x=1".into()),
        address: Some("fd00::1".parse().unwrap()),
        ..Default::default()
    };
    client.conntrack(&filter).unwrap();
    let got = String::from_utf8(server.join().unwrap()).unwrap();
    assert!(got.starts_with("GET /v1/conntrack?vpc=red%26x%3D1&address=fd00%3A%3A1 HTTP/1.1\r\n"), "{got}");
}

#[test]
fn a_stream_yields_items_until_its_end() {
    let body = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1b\r\n{\"type\":\"lost\",\"count\":3}\n\n\r\n0\r\n\r\n";
    let (_d, client, _s) = serve(body, false);
    let items: Vec<_> =
        client.events(&v1::EventFilter::default()).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(items, vec![v1::StreamItem::Lost { count: 3 }]);
}

#[test]
fn a_stream_that_is_cut_says_so() {
    let body = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1b\r\n{\"type\":\"lost\"";
    let (_d, client, _s) = serve(body, false);
    let items: Vec<_> = client.events(&v1::EventFilter::default()).unwrap().collect();
    assert!(items.last().unwrap().is_err());
}
