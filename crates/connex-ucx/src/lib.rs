//! Small, safe wrapper of libucp.
