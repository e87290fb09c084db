//! What the tests need of the operating system.

use anyhow::{Result, bail};

use crate::place::Place;
use crate::process::{command, output, run, which};
use crate::ucx;

/// Something that a Debian package brings.
struct Need {
    package: &'static str,
    what: &'static str,
    there: fn() -> bool,
}

const NEEDS: &[Need] = &[
    Need {
        package: "iproute2",
        what: "ip and tc, for the fault lab",
        there: || which("ip").is_some() && which("tc").is_some(),
    },
    Need {
        package: "nftables",
        what: "nft, for the fault lab",
        there: || which("nft").is_some(),
    },
    Need {
        package: "iptables",
        what: "iptables, for the fault lab",
        there: || which("iptables").is_some(),
    },
    Need {
        package: "g++",
        what: "a C++ compiler, for the fuzz targets",
        there: || which("c++").is_some(),
    },
    Need {
        package: "libucx0",
        what: "the distribution's UCX, for the tests that run with it",
        there: || ucx::system_lib().is_some(),
    },
];

/// Installs the packages that are missing, where we may.
///
/// # Errors
/// If something is missing and this is not root on a system with `apt-get`: with what to install.
pub(crate) fn packages(place: &Place) -> Result<()> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.there)()).collect();
    if missing.is_empty() {
        println!("all there: {}", names(&NEEDS.iter().collect::<Vec<_>>()));
        return Ok(());
    }
    if which("apt-get").is_none() || !is_root(place)? {
        let list: Vec<String> = missing
            .iter()
            .map(|need| format!("{} ({})", need.package, need.what))
            .collect();
        bail!(
            "missing on this system: {}. As root: apt-get install -y {}",
            list.join(", "),
            names(&missing)
        );
    }
    let apt = || {
        let mut apt = command(place, "apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        apt
    };
    run(apt().args(["update", "-qq"]))?;
    run(apt()
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(missing.iter().map(|need| need.package)))?;
    match missing.iter().find(|need| !(need.there)()) {
        None => Ok(()),
        Some(need) => bail!("the package {} did not bring {}", need.package, need.what),
    }
}

fn names(needs: &[&Need]) -> String {
    needs
        .iter()
        .map(|need| need.package)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether this program runs as root.
pub(crate) fn is_root(place: &Place) -> Result<bool> {
    Ok(output(command(place, "id").arg("-u"))?.trim() == "0")
}
