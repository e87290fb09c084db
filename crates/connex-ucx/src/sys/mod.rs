//! The raw interface of libucp.
//!
//! `Ucp` is a table of function pointers with one method per function; [`crate::Library`] checks that
//! every function this crate calls is in it before anybody can call one.

#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    dead_code,
    unsafe_op_in_unsafe_fn,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc
)]
mod bindings;

pub(crate) use bindings::*;

/// Names those functions of the list that the loaded library lacks.
macro_rules! missing {
    ($table:expr, $($name:ident),+ $(,)?) => {{
        let mut names: Vec<&'static str> = Vec::new();
        $(if $table.$name.is_err() { names.push(stringify!($name)); })+
        names
    }};
}

/// The functions without which this crate does not work and that `table` lacks; empty from UCX 1.13.
pub(crate) fn missing_functions(table: &Ucp) -> Vec<&'static str> {
    missing!(
        table,
        ucp_am_recv_data_nbx,
        ucp_am_send_nbx,
        ucp_cleanup,
        ucp_config_modify,
        ucp_config_print,
        ucp_config_read,
        ucp_config_release,
        ucp_conn_request_query,
        ucp_context_query,
        ucp_ep_close_nbx,
        ucp_ep_create,
        ucp_ep_flush_nbx,
        ucp_ep_print_info,
        ucp_ep_query,
        ucp_ep_rkey_unpack,
        ucp_get_nbx,
        ucp_get_version,
        ucp_get_version_string,
        ucp_init_version,
        ucp_listener_create,
        ucp_listener_destroy,
        ucp_listener_query,
        ucp_listener_reject,
        ucp_mem_map,
        ucp_mem_query,
        ucp_mem_unmap,
        ucp_put_nbx,
        ucp_request_free,
        ucp_rkey_buffer_release,
        ucp_rkey_destroy,
        ucp_rkey_pack,
        ucp_worker_arm,
        ucp_worker_create,
        ucp_worker_destroy,
        ucp_worker_fence,
        ucp_worker_get_efd,
        ucp_worker_progress,
        ucp_worker_query,
        ucp_worker_release_address,
        ucp_worker_set_am_recv_handler,
        ucp_worker_signal,
    )
}
