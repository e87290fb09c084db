//! UCX's status codes.

use std::fmt;

use crate::sys;

/// A status code of UCX, kept as the library gave it: a newer UCX may know codes that this crate does not.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub(crate) sys::ucs_status_t);

impl Status {
    /// Success.
    pub const OK: Self = Self(sys::UCS_OK);
    /// No free resource; for a connect also: no descriptor left.
    pub const NO_RESOURCE: Self = Self(sys::UCS_ERR_NO_RESOURCE);
    /// Input or output failed.
    pub const IO_ERROR: Self = Self(sys::UCS_ERR_IO_ERROR);
    /// No memory left.
    pub const NO_MEMORY: Self = Self(sys::UCS_ERR_NO_MEMORY);
    /// A parameter is wrong.
    pub const INVALID_PARAM: Self = Self(sys::UCS_ERR_INVALID_PARAM);
    /// The destination cannot be reached.
    pub const UNREACHABLE: Self = Self(sys::UCS_ERR_UNREACHABLE);
    /// The address is not one that can be used here.
    pub const INVALID_ADDR: Self = Self(sys::UCS_ERR_INVALID_ADDR);
    /// There is no such element, for instance no such setting.
    pub const NO_ELEM: Self = Self(sys::UCS_ERR_NO_ELEM);
    /// No such device.
    pub const NO_DEVICE: Self = Self(sys::UCS_ERR_NO_DEVICE);
    /// In use; for a listener: the address is taken.
    pub const BUSY: Self = Self(sys::UCS_ERR_BUSY);
    /// The operation was canceled, as a forced close does.
    pub const CANCELED: Self = Self(sys::UCS_ERR_CANCELED);
    /// A time-out of the network or of UCX.
    pub const TIMED_OUT: Self = Self(sys::UCS_ERR_TIMED_OUT);
    /// A limit is exceeded, for instance that of open files.
    pub const EXCEEDS_LIMIT: Self = Self(sys::UCS_ERR_EXCEEDS_LIMIT);
    /// Not supported by this version or by the transports in use.
    pub const UNSUPPORTED: Self = Self(sys::UCS_ERR_UNSUPPORTED);
    /// The peer refused the connection.
    pub const REJECTED: Self = Self(sys::UCS_ERR_REJECTED);
    /// There is no connection.
    pub const NOT_CONNECTED: Self = Self(sys::UCS_ERR_NOT_CONNECTED);
    /// The peer closed or reset the connection.
    pub const CONNECTION_RESET: Self = Self(sys::UCS_ERR_CONNECTION_RESET);
    /// Keepalives or retries of a connection ran out of time.
    pub const ENDPOINT_TIMEOUT: Self = Self(sys::UCS_ERR_ENDPOINT_TIMEOUT);

    /// The number, as UCX's headers have it: 0 for success, negative for errors.
    pub const fn code(self) -> i32 {
        self.0 as i32
    }

    /// Whether it is a time-out: a suspicion, not a proof that the peer is gone.
    pub const fn is_timeout(self) -> bool {
        matches!(
            self.0,
            sys::UCS_ERR_TIMED_OUT | sys::UCS_ERR_ENDPOINT_TIMEOUT
        )
    }

    /// `Ok` for success, the status otherwise.
    pub(crate) fn check(self) -> Result<(), Status> {
        if self.0 == sys::UCS_OK {
            Ok(())
        } else {
            Err(self)
        }
    }

    const fn text(self) -> Option<&'static str> {
        Some(match self.0 {
            sys::UCS_OK => "success",
            sys::UCS_INPROGRESS => "in progress",
            sys::UCS_ERR_NO_MESSAGE => "no message",
            sys::UCS_ERR_NO_RESOURCE => "no resources are available",
            sys::UCS_ERR_IO_ERROR => "input/output error",
            sys::UCS_ERR_NO_MEMORY => "out of memory",
            sys::UCS_ERR_INVALID_PARAM => "invalid parameter",
            sys::UCS_ERR_UNREACHABLE => "destination is unreachable",
            sys::UCS_ERR_INVALID_ADDR => "address not valid",
            sys::UCS_ERR_NOT_IMPLEMENTED => "not implemented",
            sys::UCS_ERR_MESSAGE_TRUNCATED => "message truncated",
            sys::UCS_ERR_NO_PROGRESS => "no progress",
            sys::UCS_ERR_BUFFER_TOO_SMALL => "buffer too small",
            sys::UCS_ERR_NO_ELEM => "no such element",
            sys::UCS_ERR_SOME_CONNECTS_FAILED => "some connects failed",
            sys::UCS_ERR_NO_DEVICE => "no such device",
            sys::UCS_ERR_BUSY => "device or address is busy",
            sys::UCS_ERR_CANCELED => "request canceled",
            sys::UCS_ERR_SHMEM_SEGMENT => "shared memory error",
            sys::UCS_ERR_ALREADY_EXISTS => "element already exists",
            sys::UCS_ERR_OUT_OF_RANGE => "index out of range",
            sys::UCS_ERR_TIMED_OUT => "operation timed out",
            sys::UCS_ERR_EXCEEDS_LIMIT => "user-defined limit was reached",
            sys::UCS_ERR_UNSUPPORTED => "unsupported operation",
            sys::UCS_ERR_REJECTED => "operation rejected by the peer",
            sys::UCS_ERR_NOT_CONNECTED => "endpoint is not connected",
            sys::UCS_ERR_CONNECTION_RESET => "connection reset by the peer",
            sys::UCS_ERR_ENDPOINT_TIMEOUT => "endpoint timeout",
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} (UCX status {})", self.0),
            None => write!(f, "UCX status {}", self.0),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_what_is_known_and_keeps_what_is_not() {
        assert_eq!(
            Status::REJECTED.to_string(),
            "operation rejected by the peer (UCX status -23)"
        );
        assert_eq!(Status(-77).to_string(), "UCX status -77");
        assert!(Status::ENDPOINT_TIMEOUT.is_timeout());
        assert!(!Status::CONNECTION_RESET.is_timeout());
    }
}
