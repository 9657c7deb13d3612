//! Errors of starting and running the controller, and the short cuts to what people read.

use godwit_rpc::pki::PkiError;
use godwit_types::{ApiError, ErrorCode};

/// Why the controller could not be made or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The directory holds no controller, or one already.
    #[error("{0}")]
    Setup(String),
    /// A file or socket.
    #[error("cannot {doing} {what}: {source}")]
    Io {
        /// Doing.
        doing: &'static str,
        /// What with.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// Certificates.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The database.
    #[error("the controller's database failed: {0}; see that its disk has room and is writable")]
    Database(#[from] sqlx::Error),
    /// The database's format.
    #[error("the controller's database cannot be brought up to date: {0}")]
    Format(#[from] sqlx::migrate::MigrateError),
    /// Something in the database that this version cannot read.
    #[error("the controller's database holds a {what} that cannot be read: {cause}")]
    Unreadable {
        /// What.
        what: &'static str,
        /// Why.
        cause: String,
    },
}

impl From<ControllerError> for ApiError {
    fn from(error: ControllerError) -> Self {
        tracing::error!(%error, "internal error");
        ApiError::new(ErrorCode::Internal, error.to_string())
    }
}

/// What operations return.
pub type Outcome<T> = Result<T, ApiError>;

/// An error in one sentence.
pub fn refuse<T>(code: ErrorCode, message: impl Into<String>) -> Outcome<T> {
    Err(ApiError::new(code, message))
}
