//! A name server that knows nothing and says so at once.

use std::net::UdpSocket;

use anyhow::{Context, Result};

/// Answers REFUSED (RFC 1035, 4.1.1) on port 53 of every address; never returns while it works.
///
/// # Errors
/// When the port is taken.
pub fn serve() -> Result<()> {
    let socket = UdpSocket::bind("[::]:53").context("listening on port 53")?;
    let mut query = [0; 1500];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
        if let Some(answer) = refusal(&query[..length]) {
            let _ = socket.send_to(&answer, from);
        }
    }
}

/// The question back, as an answer with code 5; `None` for what is no question.
fn refusal(query: &[u8]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    const RESPONSE: u8 = 0x80;
    const REFUSED: u8 = 5;
    if query.len() < HEADER || query[2] & RESPONSE != 0 {
        return None;
    }
    // One question: labels up to the root, then type and class. Additional records (EDNS) are not sent back.
    let mut end = HEADER;
    while *query.get(end)? != 0 {
        end += 1 + usize::from(query[end]);
    }
    end += 5;
    let mut answer = query.get(..end)?.to_vec();
    answer[2] |= RESPONSE;
    answer[3] = REFUSED;
    answer[4..HEADER].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_refused_and_rubbish_ignored() {
        let mut query = vec![0xab, 0xcd, 1, 0x20, 0, 1, 0, 0, 0, 0, 0, 1];
        query.extend(b"\x07example\x03com\x00\x00\x01\x00\x01");
        let question = query.len();
        query.extend(b"\x00\x00\x29\x05\xdc\x00\x00\x00\x00\x00\x00");
        let answer = refusal(&query).unwrap();
        assert_eq!(answer.len(), question);
        assert_eq!(answer[..4], [0xab, 0xcd, 0x81, 5]);
        assert_eq!(answer[4..12], [0, 1, 0, 0, 0, 0, 0, 0]);
        for length in 0..question {
            assert_eq!(refusal(&query[..length]), None, "{length}");
        }
        assert_eq!(refusal(&answer), None, "answers are not answered");
    }
}
