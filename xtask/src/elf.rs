//! What a shared library needs of the system that loads it.

use anyhow::{Context, Result, ensure};
use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64, SHT_DYNSYM};
use object::read::elf::{Dyn, FileHeader, Sym};

/// The newest glibc whose symbols may be needed: that of manylinux_2_28.
const GLIBC: (u32, u32) = (2, 28);

/// The libraries that may be needed: the C library's own and the compiler's.
const LIBRARIES: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// The unwinder that the module must share with the C library, see `wheel`.
const UNWINDER: &str = "libgcc_s.so.1";

/// Checks that `library` loads on every system of manylinux_2_28. Returns the newest glibc that it needs.
///
/// # Errors
/// A library or a symbol version that such a system may not have; a file that is no 64-bit ELF.
pub(crate) fn check(library: &[u8]) -> Result<(u32, u32)> {
    let needed = needed_libraries(library)?;
    let foreign: Vec<_> = needed
        .iter()
        .filter(|name| !LIBRARIES.contains(&name.as_str()))
        .collect();
    ensure!(
        foreign.is_empty(),
        "needs {foreign:?}, which a host may not have"
    );
    ensure!(
        needed.iter().any(|name| name == UNWINDER),
        "does not need {UNWINDER}: it brings an unwinder of its own, which crashes when an interpreter ends"
    );
    let versions = needed_versions(library)?;
    let newest = versions.iter().filter_map(|name| glibc(name)).max();
    let newest =
        newest.context("needs no version of glibc at all: its symbol versions cannot be read")?;
    ensure!(
        newest <= GLIBC,
        "needs glibc {}.{}, and {}.{} is the newest allowed: {versions:?}",
        newest.0,
        newest.1,
        GLIBC.0,
        GLIBC.1
    );
    Ok(newest)
}

/// The libraries that it names to be loaded with it.
///
/// # Errors
/// If it is no 64-bit ELF file.
pub(crate) fn needed_libraries(library: &[u8]) -> Result<Vec<String>> {
    let elf = FileHeader64::<Endianness>::parse(library)?;
    let endian = elf.endian()?;
    let sections = elf.sections(endian, library)?;
    let mut names = Vec::new();
    if let Some((entries, link)) = sections.dynamic(endian, library)? {
        let strings = sections.strings(endian, library, link)?;
        for entry in entries
            .iter()
            .filter(|entry| entry.tag32(endian) == Some(DT_NEEDED))
        {
            names.push(String::from_utf8(entry.string(endian, strings)?.to_vec())?);
        }
    }
    Ok(names)
}

/// The symbols that it wants from others.
///
/// # Errors
/// If it is no 64-bit ELF file.
pub(crate) fn undefined_symbols(library: &[u8]) -> Result<Vec<String>> {
    let elf = FileHeader64::<Endianness>::parse(library)?;
    let endian = elf.endian()?;
    let sections = elf.sections(endian, library)?;
    let symbols = sections.symbols(endian, library, SHT_DYNSYM)?;
    let mut names = Vec::new();
    for symbol in symbols.iter().filter(|symbol| symbol.is_undefined(endian)) {
        names.push(String::from_utf8(
            symbols.symbol_name(endian, symbol)?.to_vec(),
        )?);
    }
    Ok(names)
}

fn needed_versions(library: &[u8]) -> Result<Vec<String>> {
    let elf = FileHeader64::<Endianness>::parse(library)?;
    let endian = elf.endian()?;
    let sections = elf.sections(endian, library)?;
    let mut names = Vec::new();
    if let Some((mut files, link)) = sections.gnu_verneed(endian, library)? {
        let strings = sections.strings(endian, library, link)?;
        while let Some((_, mut versions)) = files.next()? {
            while let Some(version) = versions.next()? {
                names.push(String::from_utf8(version.name(endian, strings)?.to_vec())?);
            }
        }
    }
    Ok(names)
}

/// The numbers of `GLIBC_2.28`.
fn glibc(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name
        .strip_prefix("GLIBC_")?
        .split('.')
        .map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(glibc("GLIBC_2.2.5"), Some((2, 2)));
        assert_eq!(glibc("GLIBC_2.34"), Some((2, 34)));
        assert_eq!(glibc("GCC_3.0"), None);
        assert!(glibc("GLIBC_2.9") < glibc("GLIBC_2.28"));
    }

    #[test]
    fn a_program_of_this_system_is_read() {
        let me = std::fs::read(std::env::current_exe().expect("a path")).expect("readable");
        assert!(
            needed_libraries(&me)
                .expect("an ELF file")
                .contains(&"libc.so.6".to_owned())
        );
        assert!(
            undefined_symbols(&me)
                .expect("an ELF file")
                .contains(&"malloc".to_owned())
        );
        assert!(
            needed_versions(&me)
                .expect("an ELF file")
                .iter()
                .any(|v| glibc(v).is_some())
        );
        assert!(check(b"#!/bin/sh").is_err());
    }
}
