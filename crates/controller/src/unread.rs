//! Rows of the database that cannot be read: what starts without them, and what is refused while they are so.
//!
//! Pure data. A VM of which a row cannot be read is shown and is granted to nobody. Refuses: to guess what a row said.

use godwit_types::{ApiError, ErrorCode, VmName};

/// What helps, whichever row it is.
pub const WAY_OUT: &str = "stop the controller, put the newest good copy of controller.db in its place and start it again: it then reads every host before it grants anything";

/// A row that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadRow {
    pub table: &'static str,
    pub row: String,
    pub cause: String,
}

impl UnreadRow {
    /// A row of a table.
    pub fn new(table: &'static str, row: &str, cause: impl std::fmt::Display) -> Self {
        Self {
            table,
            row: row.to_owned(),
            cause: cause.to_string(),
        }
    }

    /// What is to be said of it.
    pub fn sentence(&self) -> String {
        let Self { table, row, cause } = self;
        format!(
            "row '{row}' of table {table} in the controller's database cannot be read ({cause}): {}",
            match *table {
                "drains" => "that host takes VMs again; if it is to be emptied, run 'godwit host drain' again".to_owned(),
                "migrations" => format!("whether that migration is still under way is not known here, and no host may start its VM; {WAY_OUT}"),
                "vms" => format!("the VM is shown and not started; describe it anew with 'godwit vm edit {row} FILE', or {WAY_OUT}"),
                "site_vms" => format!("the VM is shown as far as its host tells, and no host may start it; {WAY_OUT}"),
                _ => WAY_OUT.to_owned(),
            }
        )
    }
}

/// What of a VM could be read, and what could not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// Who may hold it, or how a migration of it went: nobody may be granted it.
    Right(UnreadRow),
    /// How it is described: it cannot be started until it is.
    Description(UnreadRow),
}

impl Lack {
    pub fn row(&self) -> &UnreadRow {
        match self {
            Self::Right(row) | Self::Description(row) => row,
        }
    }

    /// Whether a takeover, which reads every host, makes up for it.
    pub fn is_right_row(&self) -> bool {
        self.row().table == "site_vms"
    }

    /// The refusal of what would need the row.
    pub fn refusal(&self, vm: &VmName) -> ApiError {
        let message = format!(
            "VM {vm} cannot be granted to a host: {}",
            self.row().sentence()
        );
        ApiError::new(ErrorCode::WrongState, message)
    }
}
