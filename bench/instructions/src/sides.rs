//! What each side does for an operation. The chore knows these functions by the beginning of their names.

use connex_rs::{Engine, Range, Recipient, Result, Transfer, by_hand};

use crate::operations::{Ends, Operation};

/// Bytes of the message.
const MESSAGE: usize = 64;

/// The call of the application, up to where the request is on its way.
#[inline(never)]
pub(crate) fn asking_post(ends: &Ends, operation: Operation) -> Result<Transfer> {
    let (url, here, there) = (ends.url.as_str(), ends.here, ends.there);
    let range = |at: usize, len| Range {
        local: here + at,
        remote: there + at as u64,
        len,
    };
    // SAFETY: both ends are leaked memory that is looked at between operations only.
    unsafe {
        match operation {
            Operation::Read(len) => ends.asking.get(url, here, there, len, None),
            Operation::Write(len) => ends.asking.put(url, here, there, len, None),
            Operation::Chain => {
                let ranges = [range(0, 256), range(256, 64), range(320, 8)];
                ends.asking.put_chain(url, &ranges, None)
            }
            Operation::Message => {
                let to = Recipient::Url(url);
                ends.asking.send_msg_async(to, vec![7; MESSAGE], None)
            }
        }
    }
}

#[inline(never)]
pub(crate) fn asking_turn(ends: &Ends) -> usize {
    by_hand::turn(&ends.asking)
}

/// What the application does with the end; `None` if that has not come.
#[inline(never)]
pub(crate) fn asking_end(transfer: &Transfer) -> Option<Result<()>> {
    transfer.result()
}

/// The application lets go.
#[inline(never)]
pub(crate) fn asking_drop(transfer: Transfer) {
    drop(transfer);
}

#[inline(never)]
pub(crate) fn answering_turn(ends: &Ends) -> usize {
    by_hand::turn(&ends.answering)
}

/// The application takes a message; false if there is none.
#[inline(never)]
pub(crate) fn answering_take(engine: &Engine) -> bool {
    engine
        .recv_msg(Some(std::time::Duration::ZERO))
        .is_some_and(|(_, message)| message.len() == MESSAGE)
}
