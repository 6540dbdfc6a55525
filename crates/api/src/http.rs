//! As much HTTP/1.1 (RFC 9112) as one request per connection needs: content-length, chunked and read-to-end bodies, all bounded.

use std::io::{self, BufRead, Read};

/// Longest header line.
const MAX_LINE: usize = 8 * 1024;
/// Most header lines.
const MAX_HEADERS: usize = 64;

/// Status line and the headers that matter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) body: BodyKind,
}

/// How the body's end is found.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(crate) enum BodyKind {
    Length(u64),
    Chunked,
    ToEnd,
}

/// Writes a request; `body` is JSON.
pub(crate) fn request(method: &str, target: &str, body: Option<&[u8]>) -> Vec<u8> {
    let mut out = Vec::with_capacity(160 + body.map_or(0, <[u8]>::len));
    out.extend_from_slice(
        format!("{method} {target} HTTP/1.1\r\nhost: flowloom\r\nconnection: close\r\n").as_bytes(),
    );
    if let Some(body) = body {
        out.extend_from_slice(
            format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(),
        );
        out.extend_from_slice(body);
    } else {
        out.extend_from_slice(b"\r\n");
    }
    out
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn line(r: &mut impl BufRead) -> io::Result<String> {
    let mut buf = Vec::new();
    r.take(MAX_LINE as u64).read_until(b'\n', &mut buf)?;
    if buf.last() != Some(&b'\n') {
        return Err(if buf.len() >= MAX_LINE {
            invalid("a header line is too long")
        } else {
            io::Error::new(io::ErrorKind::UnexpectedEof, "the answer ends inside a header")
        });
    }
    while matches!(buf.last(), Some(b'\n' | b'\r')) {
        buf.pop();
    }
    String::from_utf8(buf).map_err(|_| invalid("a header line is not text"))
}

/// Reads status line and headers.
pub(crate) fn head(r: &mut impl BufRead) -> io::Result<Head> {
    let status = line(r)?;
    let code = status
        .strip_prefix("HTTP/1.1 ")
        .or_else(|| status.strip_prefix("HTTP/1.0 "))
        .and_then(|rest| rest.split(' ').next())
        .and_then(|code| code.parse::<u16>().ok())
        .filter(|code| (100..600).contains(code))
        .ok_or_else(|| invalid("the answer is not HTTP/1.1"))?;
    let mut body = BodyKind::ToEnd;
    for _ in 0..MAX_HEADERS {
        let text = line(r)?;
        if text.is_empty() {
            if code == 204 || code == 304 {
                body = BodyKind::Length(0);
            }
            return Ok(Head { status: code, body });
        }
        let (name, value) = text.split_once(':').ok_or_else(|| invalid("a header line has no colon"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") && body != BodyKind::Chunked {
            body = BodyKind::Length(value.parse().map_err(|_| invalid("content-length is not a number"))?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
            body = BodyKind::Chunked;
        }
    }
    Err(invalid("too many header lines"))
}

/// A body's bytes, whatever its framing.
#[derive(Debug)]
pub(crate) struct Body<R> {
    inner: R,
    kind: BodyKind,
    /// Bytes left of the length or of the current chunk.
    left: u64,
    done: bool,
}

impl<R: BufRead> Body<R> {
    pub(crate) fn new(inner: R, kind: BodyKind) -> Self {
        let left = if let BodyKind::Length(n) = kind { n } else { 0 };
        Self { inner, kind, left, done: false }
    }

    pub(crate) fn get_ref(&self) -> &R {
        &self.inner
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        let text = line(&mut self.inner)?;
        let size = text.split(';').next().unwrap_or_default().trim();
        self.left = u64::from_str_radix(size, 16).map_err(|_| invalid("a chunk has no size"))?;
        if self.left == 0 {
            // Trailers end with an empty line.
            for _ in 0..MAX_HEADERS {
                if line(&mut self.inner)?.is_empty() {
                    break;
                }
            }
            self.done = true;
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Body<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.done || out.is_empty() {
            return Ok(0);
        }
        if self.kind == BodyKind::ToEnd {
            return self.inner.read(out);
        }
        if self.left == 0 {
            if self.kind != BodyKind::Chunked {
                self.done = true;
                return Ok(0);
            }
            self.next_chunk()?;
            if self.done {
                return Ok(0);
            }
        }
        let most = out.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let Some(room) = out.get_mut(..most) else { return Ok(0) };
        let n = self.inner.read(room)?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer ends inside its body"));
        }
        self.left -= n as u64;
        if self.left == 0 && self.kind == BodyKind::Chunked && !line(&mut self.inner)?.is_empty() {
            return Err(invalid("a chunk is longer than it says"));
        }
        Ok(n)
    }
}

/// Percent-encodes a query value or a path segment (RFC 3986 unreserved characters stay).
pub(crate) fn encode(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for b in value.bytes() {
        if b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~') {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(answer: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        let mut r = io::BufReader::new(answer);
        let head = head(&mut r)?;
        let mut out = Vec::new();
        Body::new(r, head.body).read_to_end(&mut out)?;
        Ok((head.status, out))
    }

    #[test]
    fn every_framing_gives_the_same_body() {
        let by_length = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloIGNORED";
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nt: 1\r\n\r\n";
        let to_end = b"HTTP/1.1 200 OK\r\n\r\nhello";
        for answer in [&by_length[..], &chunked[..], &to_end[..]] {
            assert_eq!(read_all(answer).unwrap(), (200, b"hello".to_vec()));
        }
    }

    #[test]
    fn a_cut_answer_is_an_error_and_never_a_short_body() {
        let whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
        for cut in 0..whole.len() {
            assert!(read_all(&whole[..cut]).is_err(), "cut at {cut} read as complete");
        }
        assert!(read_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello").is_err());
    }

    #[test]
    fn endless_headers_are_refused() {
        let mut long = b"HTTP/1.1 200 OK\r\n".to_vec();
        long.extend(std::iter::repeat_n(b'a', MAX_LINE * 2));
        assert_eq!(read_all(&long).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let mut many = b"HTTP/1.1 200 OK\r\n".to_vec();
        for _ in 0..=MAX_HEADERS {
            many.extend_from_slice(b"a: b\r\n");
        }
        assert_eq!(read_all(&many).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn query_values_cannot_leave_their_place() {
        assert_eq!(encode("a&b=c /é"), "a%26b%3Dc%20%2F%C3%A9");
    }
}
