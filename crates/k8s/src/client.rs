//! Connection to the API server: credentials, and how many requests a second.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// An answer begins by then, or the connection is as good as dead: a server ends what it works at after 60 s (`--request-timeout`). Whoever
/// waits longer is heard by nobody, since something between may have taken the request and lost the server.
const ANSWER: Duration = Duration::from_secs(75);

/// How to reach the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// A kubeconfig file; none = the service account of this Pod.
    pub kubeconfig: Option<PathBuf>,
    /// Requests per second.
    pub qps: u32,
    /// Requests at once after a quiet time.
    pub burst: u32,
}

/// Why there is no connection or no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig file.
    #[error("kubeconfig {path}: {message}; check the file")]
    Kubeconfig {
        /// File.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// No service account.
    #[error("no service account to use ({0}); name a kubeconfig, or run as a Pod with one")]
    InCluster(String),
    /// TLS or the address.
    #[error("the connection to the API server cannot be set up: {0}")]
    Setup(String),
    /// The server said no.
    #[error("the API server answered {code} {reason}: {message}")]
    Answer {
        /// HTTP status.
        code: u16,
        /// CamelCase.
        reason: String,
        /// For people.
        message: String,
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// No answer, or one that makes no sense.
    #[error("the API server cannot be talked to: {0}")]
    Transport(String),
}

impl ClientError {
    /// HTTP status of an answer; 0 when there was none.
    #[must_use]
    pub fn code(&self) -> u16 {
        if let Self::Answer { code, .. } = self { *code } else { 0 }
    }
}

impl From<kube::Error> for ClientError {
    fn from(e: kube::Error) -> Self {
        match e {
            kube::Error::Api(status) => Self::Answer {
                code: status.code,
                retry_after: status
                    .details
                    .as_ref()
                    .map(|d| d.retry_after_seconds)
                    .filter(|s| *s > 0)
                    .map(|s| Duration::from_secs(u64::from(s))),
                reason: status.reason,
                message: status.message,
            },
            other => {
                // The causes say more than the outermost words.
                let mut text = other.to_string();
                let mut cause = std::error::Error::source(&other);
                while let Some(c) = cause {
                    let more = c.to_string();
                    if !text.contains(&more) {
                        text = format!("{text}: {more}");
                    }
                    cause = c.source();
                }
                Self::Transport(text)
            }
        }
    }
}

/// Requests that may still be made at once, and since when that is so.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

/// Talks to one API server. Clones share the connection and the rate.
#[derive(Clone)]
pub struct Client {
    inner: kube::Client,
    server: String,
    bucket: Arc<Mutex<Bucket>>,
    qps: f64,
    burst: f64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Client {
    /// Reads credentials. Nothing is sent.
    ///
    /// # Errors
    /// When there are none, or they cannot be used.
    pub async fn new(options: &ClientOptions) -> Result<Self, ClientError> {
        let mut config = match &options.kubeconfig {
            Some(path) => {
                let wrong = |e: kube::config::KubeconfigError| ClientError::Kubeconfig {
                    path: path.display().to_string(),
                    message: e.to_string(),
                };
                let file = Kubeconfig::read_from(path).map_err(wrong)?;
                kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                    .await
                    .map_err(wrong)?
            }
            None => kube::Config::incluster().map_err(|e| ClientError::InCluster(e.to_string()))?,
        };
        // Every caller tries again by itself, and shows that it had to.
        config.default_retry = false;
        let server = config.cluster_url.to_string();
        let inner = kube::Client::try_from(config).map_err(|e| ClientError::Setup(e.to_string()))?;
        Ok(Self::over(inner, server, options.qps, options.burst))
    }

    /// Over a connection of the caller's making (tests: a server in memory).
    #[must_use]
    pub fn over(inner: kube::Client, server: String, qps: u32, burst: u32) -> Self {
        let (qps, burst) = (f64::from(qps.max(1)), f64::from(burst.max(1)));
        let bucket = Arc::new(Mutex::new(Bucket { tokens: burst, at: Instant::now() }));
        Self { inner, server, bucket, qps, burst }
    }

    /// The connection itself, for requests with a pace of their own.
    #[must_use]
    pub fn connection(&self) -> kube::Client {
        self.inner.clone()
    }

    /// Address of the server.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Waits until another request may be made.
    async fn admit(&self) {
        let wait = {
            let mut bucket = self.bucket.lock().await;
            let now = Instant::now();
            let gained = now.duration_since(bucket.at).as_secs_f64() * self.qps;
            bucket.tokens = (bucket.tokens + gained).min(self.burst) - 1.0;
            bucket.at = now;
            // Whoever comes when there is none takes one on credit, and waits for it.
            Duration::from_secs_f64((-bucket.tokens).max(0.0) / self.qps)
        };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }

    /// One request, one JSON answer.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: http::Request<Vec<u8>>,
    ) -> Result<T, ClientError> {
        self.admit().await;
        answered(self.inner.request(request)).await
    }

    /// One request, the answer's text as it comes.
    pub(crate) async fn stream(
        &self,
        path: &str,
    ) -> Result<impl futures::AsyncBufRead + Unpin + Send + use<>, ClientError> {
        self.admit().await;
        let request = http::Request::get(path)
            .header(http::header::ACCEPT, "application/json")
            .body(Vec::new())
            .map_err(|e| ClientError::Transport(e.to_string()))?;
        let body = answered(self.inner.request_stream(request)).await?;
        Ok(Box::pin(body))
    }

    /// One request, the whole answer's text.
    pub(crate) async fn text(&self, path: &str) -> Result<String, ClientError> {
        self.admit().await;
        let request =
            http::Request::get(path).body(Vec::new()).map_err(|e| ClientError::Transport(e.to_string()))?;
        answered(self.inner.request_text(request)).await
    }
}

/// An answer in time. The connection of one that does not come is not used again.
async fn answered<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, ClientError> {
    match timeout(ANSWER, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(ClientError::Transport(format!("no answer within {} s", ANSWER.as_secs()))),
    }
}
