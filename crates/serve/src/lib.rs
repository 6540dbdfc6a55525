//! HTTP for the daemons: an API on a Unix socket, metrics on a TCP listener. Bounded in connections, header and time; one slow client stalls
//! nobody. Errors are the API's: `{"error":{"code":"CamelCase","message":"..."}}`.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use flowloom_api::v1::{ApiError, ErrorBody, ErrorCode};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Largest request head.
const HEAD_BYTES: usize = 16 * 1024;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// What a listener takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; more wait in the backlog.
    pub connections: usize,
    /// For a request's header to arrive.
    pub header: Duration,
}

/// An error as a response.
#[derive(Debug)]
pub struct Failure(pub ApiError);

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        Self(e)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(ErrorBody { error: self.0 })).into_response()
    }
}

/// What handlers return.
pub type Answer<T> = Result<axum::Json<T>, Failure>;

/// Makes an error.
pub fn failure(code: ErrorCode, message: impl Into<String>) -> Failure {
    Failure(ApiError::new(code, message))
}

/// Answers of paths and methods that are not there.
pub fn with_fallbacks<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    router
        .fallback(|request: Request| async move {
            failure(ErrorCode::UnknownPath, format!("{} is not a path of this API", request.uri().path()))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let message = format!("{} does not take {}", request.uri().path(), request.method());
            failure(ErrorCode::MethodNotAllowed, message)
        })
}

/// The bound socket; its file is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Best effort: the next process replaces a dead socket.
        let _ = fs::remove_file(&self.path);
    }
}

/// Binds the socket with mode 0600. A socket that somebody answers on is left alone.
///
/// # Errors
/// When the path is taken by a live socket or another file, or cannot be made.
pub fn bind(path: &Path) -> io::Result<Socket> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("socket {}: {e}", path.display()));
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(at)?;
    }
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(at(e)),
        Ok(m) if !m.file_type().is_socket() => {
            return Err(at(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is no socket is in the way",
            )));
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => {
                return Err(at(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on it")));
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(at)?,
            Err(e) => return Err(at(e)),
        },
    }
    // Under another name first, so that nobody connects before the mode is right.
    let hidden = path.with_extension(format!("{}.tmp", std::process::id()));
    let _ = fs::remove_file(&hidden);
    let listener = std::os::unix::net::UnixListener::bind(&hidden).map_err(at)?;
    let ready = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&hidden, path))
        .and_then(|()| listener.set_nonblocking(true));
    if let Err(e) = ready {
        let _ = fs::remove_file(&hidden);
        return Err(at(e));
    }
    Ok(Socket { listener: UnixListener::from_std(listener).map_err(at)?, path: path.to_owned() })
}

/// Serves until `stop` turns true. Only root and the daemon's own user may speak, whatever the file's mode became.
pub async fn serve(socket: Socket, router: Router, limits: Limits, mut stop: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let own = nix::unistd::geteuid().as_raw();
    while let Some(slot) = slot(&slots, &mut stop).await {
        let accepted = tokio::select! {
            accepted = socket.listener.accept() => accepted.map(|(s, _)| s),
            _ = stop.wait_for(|s| *s) => return,
        };
        let Some(stream) = accepted_or_pause(accepted).await else { continue };
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == 0 || peer.uid() == own => {}
            other => {
                tracing::warn!(peer = ?other, "refused an API client of another user");
                continue;
            }
        }
        connection(stream, router.clone(), limits, slot);
    }
}

/// Listens on TCP. `[::]` takes both families, and IPv4 alone where the kernel has no IPv6.
///
/// # Errors
/// When the address is taken or none of this host's, with the address. Needs a runtime.
pub fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let bound = match bound(at) {
        Err(e) if at.is_ipv6() && at.ip().is_unspecified() && no_such_family(&e) => {
            bound((Ipv4Addr::UNSPECIFIED, at.port()).into())
        }
        other => other,
    };
    bound.map_err(|e| io::Error::new(e.kind(), format!("{at}: {e}")))
}

fn bound(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if at.is_ipv6() {
        // Whatever net.ipv6.bindv6only says.
        nix::sys::socket::setsockopt(
            &socket,
            nix::sys::socket::sockopt::Ipv6V6Only,
            &!at.ip().is_unspecified(),
        )?;
    }
    // The connections of a process before this one may linger.
    socket.set_reuseaddr(true)?;
    socket.bind(at)?;
    socket.listen(BACKLOG)
}

fn no_such_family(e: &io::Error) -> bool {
    use nix::errno::Errno;
    let known = [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL, Errno::EPROTONOSUPPORT].map(|e| Some(e as i32));
    known.contains(&e.raw_os_error())
}

/// The same over TCP, for what anybody may read.
pub async fn serve_tcp(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    while let Some(slot) = slot(&slots, &mut stop).await {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.map(|(s, _)| s),
            _ = stop.wait_for(|s| *s) => return,
        };
        let Some(stream) = accepted_or_pause(accepted).await else { continue };
        connection(stream, router.clone(), limits, slot);
    }
}

/// `None`: told to stop.
async fn slot(slots: &Arc<Semaphore>, stop: &mut watch::Receiver<bool>) -> Option<OwnedSemaphorePermit> {
    tokio::select! {
        slot = slots.clone().acquire_owned() => slot.ok(),
        _ = stop.wait_for(|s| *s) => None,
    }
}

async fn accepted_or_pause<T>(accepted: io::Result<T>) -> Option<T> {
    match accepted {
        Ok(stream) => Some(stream),
        Err(e) => {
            // Out of descriptors: the connections that end give some back.
            tracing::warn!(error = %e, "a listener refuses to accept");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limits: Limits,
    slot: OwnedSemaphorePermit,
) {
    tokio::spawn(async move {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        if let Err(e) = connection.await {
            tracing::debug!(error = %e, "a connection ended");
        }
        drop(slot);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_private_and_a_live_one_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let socket = bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let e = bind(&path).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::AddrInUse, "{e}");
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "x").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
    }

    #[tokio::test]
    async fn a_socket_that_a_dead_process_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        bind(&path).unwrap();
    }

    #[tokio::test]
    async fn every_address_means_those_of_both_families_and_a_taken_one_is_named() {
        let listener = listen("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        for at in [format!("127.0.0.1:{port}"), format!("[::1]:{port}")] {
            let client = tokio::net::TcpStream::connect(&at).await;
            assert!(client.is_ok(), "{at}: {client:?}");
        }
        let e = listen(([127, 0, 0, 1], port).into()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::AddrInUse);
        assert!(e.to_string().contains(&port.to_string()), "{e}");
        // One address of IPv6 is no address of IPv4.
        let listener = listen("[::1]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err());
    }
}
