//! Where facts come from. Each source runs for itself and tells the core; the core waits for the first list of every one.

use std::future::Future;
use std::pin::Pin;

use flowloom_k8s::slices::PublishedSlice;
use flowloom_k8s::{Client, Happening, Pod, Selection, follow};
use tokio::sync::mpsc;

/// What a source says.
#[derive(Debug)]
pub enum News {
    /// Of Pods.
    Pods(Happening<Pod>),
    /// Of slices at the API server.
    Slices(Happening<PublishedSlice>),
}

/// Tells the core. False: nobody listens any more.
pub type Tell = mpsc::UnboundedSender<(usize, News)>;

/// A part of the outside world that is followed.
pub trait Source: Send {
    /// Name in status and metrics.
    fn name(&self) -> &'static str;
    /// Follows until nobody listens. What goes wrong is told, and tried again.
    fn follow(self: Box<Self>, number: usize, tell: Tell) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Pods of the API server.
#[derive(Debug)]
pub struct Pods {
    /// Connection.
    pub client: Client,
    /// Makes watches of several processes end at different times.
    pub jitter: u64,
}

/// Slices of the API server: what this program and those before it published.
#[derive(Debug)]
pub struct Slices {
    /// Connection.
    pub client: Client,
    /// As in [`Pods`].
    pub jitter: u64,
}

impl Source for Pods {
    fn name(&self) -> &'static str {
        "pods"
    }

    fn follow(self: Box<Self>, number: usize, tell: Tell) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            follow(&self.client, &Selection::default(), self.jitter, |h| {
                tell.send((number, News::Pods(h))).is_ok()
            })
            .await;
        })
    }
}

impl Source for Slices {
    fn name(&self) -> &'static str {
        "workloadslices"
    }

    fn follow(self: Box<Self>, number: usize, tell: Tell) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            follow(&self.client, &Selection::default(), self.jitter, |h| {
                tell.send((number, News::Slices(h))).is_ok()
            })
            .await;
        })
    }
}
