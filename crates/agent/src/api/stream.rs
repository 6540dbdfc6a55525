//! `GET /v1/events`: lines of JSON, as many as the client reads.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use flowloom_api::v1::{EventFilter, StreamItem};
use hyper::body::Frame;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::{Context, Failure, query};
use crate::events::Passes;

/// Chunks between the reader of events and a client's socket.
const CHUNKS: usize = 64;

pub(crate) async fn events(State(context): State<Context>, uri: Uri) -> Result<Response, Failure> {
    let filter: EventFilter = query(&uri)?;
    let log = context.core.events().clone();
    // Asked for or not, history comes first: all of it without `follow`, none with it.
    let last = filter.last.map(|n| n as usize).or(filter.follow.then_some(0));
    let passes = if [&filter.endpoint, &filter.from, &filter.to].into_iter().all(Option::is_none) {
        Passes::of(&filter)
    } else {
        let filter = filter.clone();
        context.core.ask(move |core| core.passes_of(&filter)).await??
    };
    let (old, mut new) = log.subscribe(|e| passes.event(e), last);
    let (sender, receiver) = mpsc::channel(CHUNKS);
    let open = log.open_stream();
    tokio::spawn(async move {
        let _open = open;
        for event in old {
            if sender.send(line(&StreamItem::Event(Box::new((*event).clone())))).await.is_err() {
                return;
            }
        }
        if !filter.follow {
            return;
        }
        loop {
            let received = tokio::select! {
                received = new.recv() => received,
                () = sender.closed() => return,
            };
            let item = match received {
                Ok(event) if passes.event(&event) => StreamItem::Event(Box::new((*event).clone())),
                Ok(_) => continue,
                Err(RecvError::Lagged(count)) => StreamItem::Lost { count },
                Err(RecvError::Closed) => return,
            };
            if sender.send(line(&item)).await.is_err() {
                return;
            }
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(Lines(receiver))).into_response())
}

fn line(item: &StreamItem) -> Bytes {
    // These types have string keys only: serialising cannot fail.
    let mut text = serde_json::to_vec(item).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

struct Lines(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Lines {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|bytes| Ok(Frame::data(bytes))))
    }
}
