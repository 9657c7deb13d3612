//! Writes a configuration file that a set-up makes.
//!
//! Owns nothing. Refuses: to say that it is written before a power cut leaves it there.

use godwit_store::{Files as _, RealFiles, make_directory, replace_durably};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Writes it durably, readable for everybody, and makes its directory if it is not there.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    make_directory(directory.unwrap_or(Path::new(".")), 0o755).map_err(io::Error::other)?;
    replace_durably(&RealFiles, path, text.as_bytes()).map_err(io::Error::other)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    RealFiles.sync_file(path)
}
