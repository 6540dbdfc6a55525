//! Where the built programs are.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// The path of `flowloom`, `flowloom-agent` or `flowloom-cni`: in `FLOWLOOM_BIN_DIR`, else beside this program.
///
/// # Errors
/// When it was not built.
pub fn binary(name: &str) -> Result<String> {
    let dir = match std::env::var_os("FLOWLOOM_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => {
            let own = std::env::current_exe()?;
            let dir = own.parent().context("no directory")?;
            // Tests live in `deps`.
            if dir.ends_with("deps") {
                dir.parent().context("no directory")?.to_owned()
            } else {
                dir.to_owned()
            }
        }
    };
    let path = dir.join(name);
    if !path.is_file() {
        bail!("{} is not built: `cargo xtask test e2e` builds it with the programs inside", path.display());
    }
    Ok(path.display().to_string())
}
