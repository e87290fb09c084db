//! What can go wrong.

use std::path::PathBuf;

use thiserror::Error;

use crate::library::{MIN_VERSION, Version};
use crate::status::Status;

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// UCX refused or failed.
    #[error("{operation}{} failed: {status}", peer.as_ref().map(|p| format!(" ({p})")).unwrap_or_default())]
    Ucx {
        /// The function of UCX.
        operation: &'static str,
        /// What it returned.
        status: Status,
        /// The peer, address or setting that the call was about, where there is one.
        peer: Option<String>,
    },
    /// The endpoint, listener, request or key is closed, or its worker is gone.
    #[error("{operation}: the {what} is closed already")]
    Closed {
        /// The call.
        operation: &'static str,
        /// Which kind of object.
        what: &'static str,
    },
    /// The object belongs to another worker, or a key to another endpoint.
    #[error("{operation}: the {what} belongs to another one")]
    Foreign {
        /// The call.
        operation: &'static str,
        /// Which kind of object.
        what: &'static str,
    },
    /// An argument that UCX could not even be asked about.
    #[error("{operation}: {problem}")]
    Invalid {
        /// The call.
        operation: &'static str,
        /// What is wrong, with the value.
        problem: String,
    },
}

impl Error {
    /// UCX's own status, where UCX was asked.
    pub fn status(&self) -> Option<Status> {
        match self {
            Error::Ucx { status, .. } => Some(*status),
            _ => None,
        }
    }

    pub(crate) fn ucx(operation: &'static str, status: Status) -> Self {
        Error::Ucx {
            operation,
            status,
            peer: None,
        }
    }

    pub(crate) fn about(operation: &'static str, status: Status, peer: impl Into<String>) -> Self {
        Error::Ucx {
            operation,
            status,
            peer: Some(peer.into()),
        }
    }
}

/// No UCX could be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// Nothing was found anywhere.
    #[error("{}", not_found(tried))]
    NotFound {
        /// Every place that was looked at, with what was wrong there.
        tried: Vec<String>,
    },
    /// A variable names a UCX that is not there.
    #[error("{variable}={value} holds no libucp.so.0 (looked at {}). Unset it, or name the folder or the file of a UCX {MIN_VERSION} or newer", looked_at.join(", "))]
    NotThere {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The files that would have done.
        looked_at: Vec<String>,
    },
    /// The process has loaded one UCX and a variable names another: two in one process hang or crash.
    #[error("the process has already loaded {}, but {variable} names {}: two copies of UCX in one process do not work. Unset {variable}, or name the loaded one, or start connex-rs before whatever loaded the other", loaded.display(), wanted.display())]
    Another {
        /// What the process has.
        loaded: PathBuf,
        /// The variable that names another.
        variable: &'static str,
        /// What it names.
        wanted: PathBuf,
    },
    /// The dynamic loader refused the library.
    #[error("cannot load {}: {reason}", path.display())]
    Broken {
        /// The library.
        path: PathBuf,
        /// The loader's own words.
        reason: String,
    },
    /// It is older than what this crate can work with.
    #[error("{} is UCX {version}, and connex-rs needs {MIN_VERSION} or newer. Set CONNEX_RS_UCX to a newer one, or `pip install libucx-cu12`", path.display())]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version.
        version: Version,
    },
    /// It lacks functions.
    #[error("{} (UCX {version}) lacks {}", path.display(), missing.join(", "))]
    Incomplete {
        /// The library.
        path: PathBuf,
        /// Its version.
        version: Version,
        /// The functions.
        missing: Vec<&'static str>,
    },
}

fn not_found(tried: &[String]) -> String {
    let mut text = String::from("no UCX was found. Tried:\n");
    for place in tried {
        text.push_str("  - ");
        text.push_str(place);
        text.push('\n');
    }
    text.push_str(
        "One of these helps:\n  pip install libucx-cu12        (TCP, shared memory, CUDA; no RDMA)\n  \
         apt-get install libucx0        (Debian and Ubuntu, with RDMA)\n  dnf install ucx ucx-ib         \
         (Fedora and RHEL, with RDMA)\n  export CONNEX_RS_UCX=/path/to  (the folder or the file of a libucp.so.0)",
    );
    text
}
