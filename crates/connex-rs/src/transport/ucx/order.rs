//! Which connections place one-sided writes in the order in which they are posted.
//!
//! Everything that is not known to keep the order counts as not keeping it. A reliable connection transmits and executes
//! writes in the order of their posting. Four things stand between that and what a processor sees that polls:
//!
//! - several lanes, which do not order each other;
//! - a device that may let writes overtake each other in memory (PCI relaxed ordering: off unless somebody set it);
//! - a network with more than one way, and a device that places packets as they come (adaptive routing, direct data placement:
//!   on by default on mlx5 where the hardware has them);
//! - UCX: writes that it emulates by messages, and a fence that waits.

use connex_ucx::Lane;

use super::settings::{Facts, V2_EMULATES};

/// The first version with direct data placement on mlx5.
const DIRECT_PLACEMENT: u32 = 18;

/// What settings and devices say about all connections of an engine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Order {
    /// No setting is against it.
    allowed: bool,
    /// Transports of mlx5 that the user keeps from placing packets as they come.
    strict: Vec<&'static str>,
    /// Devices in software, with their ports: packets of a connection go one way and are executed in turn.
    software: Vec<String>,
}

impl Order {
    pub(super) fn of(facts: &Facts) -> Self {
        let says = |name: &str| facts.env.get(&format!("UCX_{name}")).map(|v| said(v));
        let off = |name: &str| says(name) == Some(Said::No);
        let minor = facts.version.minor;
        // What is not set here is set by the plan.
        let unrelaxed = says("IB_PCI_RELAXED_ORDERING").is_none_or(|said| said == Said::No);
        let weak = facts.env.get("UCX_FENCE_MODE");
        let no_wait = weak.is_none_or(|mode| mode.trim().eq_ignore_ascii_case("weak"));
        let by_hardware = says("PREFER_OFFLOAD").is_none_or(|said| said == Said::Yes)
            && !(V2_EMULATES.contains(&minor)
                && says("PROTO_ENABLE").is_some_and(|s| s != Said::No));
        // A name for one transport or device alone would win over the general one.
        let routed = facts.env.keys().any(|name| {
            let general = name == "UCX_IB_AR_ENABLE";
            (name.ends_with("AR_ENABLE") && !general) || name.ends_with("OOO_RW_ENABLE")
        });
        let strict = ["rc_mlx5", "dc_mlx5"].into_iter().filter(|transport| {
            let placement = format!("{}_DDP_ENABLE", transport.to_ascii_uppercase());
            off("IB_AR_ENABLE") && !routed && (minor < DIRECT_PLACEMENT || off(&placement))
        });
        let software = facts.rdma.iter().filter(|device| device.software);
        Self {
            allowed: unrelaxed && no_wait && by_hardware,
            strict: strict.collect(),
            software: software.map(|device| device.name.clone()).collect(),
        }
    }

    /// Whether a connection with these lanes keeps the order.
    pub(super) fn holds(&self, lanes: &[Lane]) -> bool {
        // A lane without a device makes connections only. Unreliable datagrams carry messages and keepalives: UCX has no one-sided
        // access over them, but in tiny pieces that it does not use where there is a reliable lane.
        let mut writes = lanes
            .iter()
            .filter(|lane| !lane.device.is_empty() && !lane.transport.starts_with("ud"));
        let (Some(lane), None) = (writes.next(), writes.next()) else {
            return false;
        };
        let in_turn = match lane.transport.as_str() {
            "rc_verbs" => self.software.contains(&lane.device),
            transport => self.strict.contains(&transport),
        };
        self.allowed && in_turn
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Said {
    Yes,
    No,
    Other,
}

/// A switch as UCX reads it.
fn said(value: &str) -> Said {
    match value.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" | "on" | "1" => Said::Yes,
        "n" | "no" | "off" | "0" => Said::No,
        _ => Said::Other,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use connex_ucx::Version;

    use super::super::settings::RdmaDevice;
    use super::*;

    fn holds(minor: u32, env: &[(&str, &str)], lanes: &[(&str, &str)]) -> bool {
        let device = |name: &str, software| RdmaDevice {
            name: name.into(),
            interfaces: Vec::new(),
            software,
        };
        let env = env.iter().map(|(n, v)| ((*n).into(), (*v).into()));
        let facts = Facts {
            version: Version {
                major: 1,
                minor,
                release: 0,
            },
            env: BTreeMap::from_iter(env),
            addr: "10.0.0.1".parse().expect("an address"),
            interface: None,
            rdma: vec![device("rxe0:1", true), device("mlx5_0:1", false)],
            obstacles: Vec::new(),
            locked_limit: None,
            cuda: false,
        };
        let lane = |(transport, device): &(&str, &str)| Lane {
            transport: (*transport).into(),
            device: (*device).into(),
        };
        let lanes: Vec<_> = lanes.iter().map(lane).collect();
        Order::of(&facts).holds(&lanes)
    }

    const RXE: (&str, &str) = ("rc_verbs", "rxe0:1");
    const MLX5: (&str, &str) = ("rc_mlx5", "mlx5_0:1");

    #[test]
    fn one_reliable_lane_keeps_the_order_and_nothing_else_does() {
        let of = |lanes: &[(&str, &str)]| holds(22, &[], lanes);
        assert!(of(&[RXE]));
        assert!(of(&[("rdmacm", ""), RXE, ("ud_verbs", "rxe0:1")]));
        for lanes in [
            &[][..],
            &[RXE, RXE],
            &[RXE, ("rc_verbs", "rxe1:1")],
            &[RXE, ("tcp", "eth0")],
            &[RXE, ("rc_mlx5", "mlx5_0:1")],
            &[("ud_verbs", "rxe0:1")],
            &[("tcp", "eth0")],
            &[("sysv", "memory")],
            // A device that is not known to be one in software.
            &[("rc_verbs", "mlx5_0:1")],
            &[("rc_verbs", "rxe9:1")],
            &[MLX5],
            &[("dc_mlx5", "mlx5_0:1")],
            &[("gga_mlx5", "mlx5_0:1")],
            &[("srd", "efa_0:1")],
        ] {
            assert!(!of(lanes), "{lanes:?}");
        }
    }

    #[test]
    fn settings_that_let_writes_overtake_each_other_or_make_the_fence_wait_are_noticed() {
        for (name, value, kept) in [
            ("UCX_IB_PCI_RELAXED_ORDERING", "n", true),
            ("UCX_IB_PCI_RELAXED_ORDERING", "on", false),
            ("UCX_IB_PCI_RELAXED_ORDERING", "try", false),
            ("UCX_IB_PCI_RELAXED_ORDERING", "auto", false),
            ("UCX_FENCE_MODE", "weak", true),
            ("UCX_FENCE_MODE", "auto", false),
            ("UCX_FENCE_MODE", "strong", false),
            ("UCX_FENCE_MODE", "ep_based", false),
            ("UCX_PREFER_OFFLOAD", "y", true),
            ("UCX_PREFER_OFFLOAD", "n", false),
            ("UCX_PROTO_ENABLE", "y", true),
        ] {
            assert_eq!(holds(22, &[(name, value)], &[RXE]), kept, "{name}={value}");
        }
        // These emulate by messages what the protocol does in hardware later.
        for minor in [16, 17, 18] {
            assert!(!holds(minor, &[("UCX_PROTO_ENABLE", "y")], &[RXE]));
            assert!(holds(minor, &[("UCX_PROTO_ENABLE", "n")], &[RXE]));
        }
    }

    #[test]
    fn mlx5_keeps_the_order_where_it_is_told_to() {
        let routing = ("UCX_IB_AR_ENABLE", "n");
        let placement = ("UCX_RC_MLX5_DDP_ENABLE", "n");
        assert!(holds(22, &[routing, placement], &[MLX5]));
        assert!(holds(17, &[routing], &[MLX5]), "there is no placement yet");
        for env in [
            &[][..],
            &[routing],
            &[placement],
            &[routing, ("UCX_DC_MLX5_DDP_ENABLE", "n")],
            &[("UCX_IB_AR_ENABLE", "try"), placement],
            &[routing, placement, ("UCX_RC_MLX5_AR_ENABLE", "y")],
            &[routing, placement, ("UCX_IB_PCI_RELAXED_ORDERING", "y")],
        ] {
            assert!(!holds(22, env, &[MLX5]), "{env:?}");
        }
        let dc = [routing, ("UCX_DC_MLX5_DDP_ENABLE", "n")];
        assert!(holds(22, &dc, &[("dc_mlx5", "mlx5_0:1")]));
        assert!(!holds(22, &[routing, placement], &[MLX5, MLX5]));
    }
}
