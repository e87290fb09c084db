//! The transports of an endpoint, from what `ucp_ep_print_info` prints: the only source before UCX 1.14.

use crate::endpoint::Lane;

/// The lanes in the text that UCX prints for an endpoint, in its order: each, also where several go over one device.
///
/// A lane is a line such as
///
/// ```text
/// #                 lane[0]:  2:rc_verbs/rxe0:1.0 md[3]         -> md[3]/ib/sysdev[255] rma_bw#0 am
/// ```
///
/// that is the number of a resource, `transport/device`, and behind the last dot the number of the path on it, which UCX
/// leaves away for some. A lane that only makes connections (`cm rdmacm`) is none to report.
pub(crate) fn parse(text: &str) -> Vec<Lane> {
    text.lines().filter_map(lane).collect()
}

fn lane(line: &str) -> Option<Lane> {
    let rest = line.trim_start_matches([' ', '#']).strip_prefix("lane[")?;
    let (number, rest) = rest.split_once("]:")?;
    number.parse::<u32>().ok()?;
    // What has no number (`cm rdmacm`) carries no data.
    let (resource, name) = rest.split_whitespace().next()?.split_once(':')?;
    resource.parse::<u32>().ok()?;
    let (transport, device) = name.split_once('/')?;
    Some(Lane {
        transport: transport.to_owned(),
        device: without_path(device).to_owned(),
    })
}

/// A device without the number of the path on it. Devices may have dots themselves (`eth0.12`), and then the number is there too.
fn without_path(device: &str) -> &str {
    match device.rsplit_once('.') {
        Some((name, path)) if !path.is_empty() && path.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => device,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(found: &[Lane], expected: &[(&str, &str)]) {
        let found: Vec<_> = found
            .iter()
            .map(|l| (l.transport.as_str(), l.device.as_str()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn as_1_13_prints_it() {
        let text = "\
#
# UCP endpoint 
#
#               peer: <no debug data>
#                 lane[0]: cm rdmacm
#                 lane[1]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] rma_bw#0 am am_bw#0 wireup
#
#                 am_send: 0..<egr/short>..262137..<egr/zcopy>..262144..<rndv>..(inf)
#
#                  rma_bw: mds [0] rndv_rkey_size 10
#
";
        is(&parse(text), &[("tcp", "lo")]);
    }

    #[test]
    fn as_1_16_and_later_print_it_with_shared_memory_and_tables() {
        let text = "\
# UCP endpoint 
#               peer: <no debug data>
#                 lane[0]: cm tcp
#                 lane[1]:  1:posix/memory.0 md[1]          -> md[1]/posix/sysdev[255] seg 4294967295 am am_bw#0 keepalive
#                 lane[2]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] seg 4294967295 rma_bw#0 wireup
#
# +--------------------------------+---------------------------------------------+
# | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from host    |
# +--------------------------------+--------------------------+------------------+
# |                        0..2038 | short                    | posix/memory     |
# +--------------------------------+--------------------------+------------------+
";
        is(&parse(text), &[("posix", "memory"), ("tcp", "lo")]);
    }

    #[test]
    fn ports_paths_and_dots_of_devices() {
        let text = "\
#                 lane[0]:  7:rc_mlx5/mlx5_0:1.0 md[4]      -> md[4]/ib/sysdev[1] rma_bw#0 am am_bw#0
#                 lane[1]:  8:rc_mlx5/mlx5_0:1.1 md[4]      -> md[4]/ib/sysdev[1] rma_bw#1
#                 lane[2]:  2:tcp/eth0.12.0 md[1]           -> md[1]/tcp/sysdev[255] wireup
#                 lane[3]:  3:tcp/eth1 md[1]                -> md[1]/tcp/sysdev[255] wireup
";
        is(
            &parse(text),
            &[
                ("rc_mlx5", "mlx5_0:1"),
                ("rc_mlx5", "mlx5_0:1"),
                ("tcp", "eth0.12"),
                ("tcp", "eth1"),
            ],
        );
    }

    #[test]
    fn what_carries_no_data_and_what_is_no_lane_is_left_out() {
        for text in [
            "",
            "#\n# UCP endpoint\n#               peer: <no debug data>\n",
            "#                 lane[0]: cm rdmacm\n",
            "#                 lane[0]: cm <unknown>\n",
            "#                 lane[1]: proxy\n",
            "#                 lane[x]:  0:tcp/lo.0 md[0] -> md[0]\n",
            "#                 lane[0]:  0:tcp md[0] -> md[0]\n",
            "#                 lane[0]:\n",
            "lane[0]",
            "# | 0..2038 | 0:tcp/lo.0 |\n",
        ] {
            is(&parse(text), &[]);
        }
    }
}
