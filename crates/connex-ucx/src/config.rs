//! UCX's settings for one context.

use std::ffi::CString;
use std::ptr::{self, NonNull};

use crate::error::{Error, Result};
use crate::library::Library;
use crate::printed::printed;
use crate::status::Status;
use crate::sys;

/// The settings that a [`Context`](crate::Context) will be made with: UCX's defaults, its configuration file, the
/// process's `UCX_*` variables, and what [`Config::set`] changed. The environment itself is never touched.
pub struct Config {
    pub(crate) library: &'static Library,
    pub(crate) raw: NonNull<sys::ucp_config_t>,
    changes: Vec<(String, String)>,
}

impl Config {
    /// Reads the settings as they are now.
    ///
    /// # Errors
    /// A `UCX_*` variable with a value that UCX cannot parse.
    pub fn read(library: &'static Library) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: null prefix and file name mean the usual ones; `raw` receives the result.
        let status = unsafe {
            library
                .ucp
                .ucp_config_read(ptr::null(), ptr::null(), &mut raw)
        };
        Status(status)
            .check()
            .map_err(|s| Error::ucx("ucp_config_read", s))?;
        let raw = NonNull::new(raw).ok_or(Error::ucx("ucp_config_read", Status::NO_MEMORY))?;
        Ok(Self {
            library,
            raw,
            changes: Vec::new(),
        })
    }

    /// Changes one setting. `name` is without the `UCX_` in front: `TLS`, `TCP_TX_SEG_SIZE`.
    ///
    /// UCX checks the names and values of its protocol layer here; those of a transport only when it opens the
    /// transport, so a misspelt one of these goes unnoticed.
    ///
    /// # Errors
    /// A value that does not parse, or a zero byte inside.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let text = |s: &str| {
            CString::new(s).map_err(|_| Error::Invalid {
                operation: "ucp_config_modify",
                problem: format!("a zero byte in {s:?}"),
            })
        };
        let (c_name, c_value) = (text(name)?, text(value)?);
        // SAFETY: `raw` is alive, and both strings end with a zero.
        let status = unsafe {
            self.library
                .ucp
                .ucp_config_modify(self.raw.as_ptr(), c_name.as_ptr(), c_value.as_ptr())
        };
        Status(status)
            .check()
            .map_err(|s| Error::about("ucp_config_modify", s, format!("UCX_{name}={value}")))?;
        self.changes.push((name.to_owned(), value.to_owned()));
        Ok(())
    }

    /// What was set here, in order.
    pub fn changes(&self) -> &[(String, String)] {
        &self.changes
    }

    /// The value that UCX holds for `name` (without `UCX_`), as UCX prints it; `None` if it shows none. Settings of
    /// transports (`TCP_TX_SEG_SIZE`) belong to the transports and are not shown.
    pub fn get(&self, name: &str) -> Option<String> {
        let wanted = format!("UCX_{name}=");
        self.print()
            .lines()
            .find_map(|line| line.strip_prefix(&wanted))
            .map(|value| value.trim_end().to_owned())
    }

    /// All settings, one `UCX_NAME=value` a line.
    pub fn print(&self) -> String {
        printed(|stream| {
            // SAFETY: `raw` is alive and `stream` is open; an empty title is not printed.
            unsafe {
                self.library.ucp.ucp_config_print(
                    self.raw.as_ptr(),
                    stream,
                    c"".as_ptr(),
                    sys::UCS_CONFIG_PRINT_CONFIG,
                )
            }
        })
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: it was read by us and is released once.
        unsafe { self.library.ucp.ucp_config_release(self.raw.as_ptr()) };
    }
}
