//! The systems that are measured, and the one text that each has in the table of cells, in tables and in `--system`.
//!
//! Pure. Refuses a text that is not exactly what a system would be called.

use serde::Deserialize;

/// Where a QEMU keeps its guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A shared file on a tmpfs, as Godwit has it.
    File,
    Anonymous,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    Seven,
    /// The one fetched into a directory of its own.
    Ten,
}

/// How a QEMU migrates by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    pub version: Version,
    /// Channels of multifd; none: without it.
    pub channels: Option<u32>,
    pub tls: bool,
    /// Where memory lies, on both sides.
    pub backend: Backend,
    /// `prealloc=on` at the destination.
    pub prepared: bool,
    /// Its own way to slow a guest that writes faster than the link.
    pub converge: bool,
}

/// A system under measurement, with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum System {
    Godwit {
        /// Pages sealed.
        encrypted: bool,
        prepared: bool,
    },
    Qemu(Way),
    /// What the network gives.
    Iperf {
        streams: u32,
    },
    /// How fast pages of a file like the destination's come, with all cores.
    FirstTouch {
        huge: bool,
    },
    /// How fast the library seals, or opens.
    Cipher {
        open: bool,
    },
}

impl TryFrom<String> for System {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let read = Self::read(&text).filter(|system| system.described() == text);
        read.ok_or_else(|| {
            format!("'{text}' is no system with its config, encryption and destination")
        })
    }
}

impl System {
    /// Reads what [`System::described`] writes; what it takes for granted is refused by its caller's comparison.
    fn read(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once(' ')?;
        let (rest, destination) = rest.rsplit_once(' ')?;
        let (config, encryption) = rest.rsplit_once(' ')?;
        let prepared = destination == "prepared";
        let version = match name {
            "godwit" => {
                let encrypted = encryption != "none";
                return Some(Self::Godwit {
                    encrypted,
                    prepared,
                });
            }
            "iperf3" => {
                let streams = config.strip_prefix("streams=")?.parse().ok()?;
                return Some(Self::Iperf { streams });
            }
            "first-touch" => {
                return Some(Self::FirstTouch {
                    huge: config.starts_with("huge"),
                });
            }
            "aes-256-gcm" => {
                return Some(Self::Cipher {
                    open: config == "open",
                });
            }
            "qemu-7.2" => Version::Seven,
            "qemu-10.0" => Version::Ten,
            _ => return None,
        };
        let way = config.split(',').next()?;
        let channels = way
            .strip_prefix("multifd-")
            .map(str::parse)
            .transpose()
            .ok()?;
        let anonymous = config.contains("ram=anonymous");
        Some(Self::Qemu(Way {
            version,
            channels,
            tls: encryption == "tls",
            backend: if anonymous {
                Backend::Anonymous
            } else {
                Backend::File
            },
            prepared,
            converge: config.ends_with(",auto-converge"),
        }))
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Godwit { .. } => "godwit",
            Self::Qemu(Way {
                version: Version::Seven,
                ..
            }) => "qemu-7.2",
            Self::Qemu(Way {
                version: Version::Ten,
                ..
            }) => "qemu-10.0",
            Self::Iperf { .. } => "iperf3",
            Self::FirstTouch { .. } => "first-touch",
            Self::Cipher { .. } => "aes-256-gcm",
        }
    }

    pub fn config(&self) -> String {
        match self {
            Self::Godwit { .. } => "default".into(),
            Self::Qemu(way) => {
                let channels = way
                    .channels
                    .map_or("plain".into(), |count| format!("multifd-{count}"));
                let ram = match way.backend {
                    Backend::File => "file",
                    Backend::Anonymous => "anonymous",
                };
                let slowed = if way.converge { ",auto-converge" } else { "" };
                format!("{channels},ram={ram}{slowed}")
            }
            Self::Iperf { streams } => format!("streams={streams}"),
            Self::FirstTouch { huge: true } => "huge=within_size".into(),
            Self::FirstTouch { huge: false } => "4 KiB pages".into(),
            Self::Cipher { open: false } => "seal".into(),
            Self::Cipher { open: true } => "open".into(),
        }
    }

    pub fn destination(&self) -> &'static str {
        match self {
            Self::Godwit { prepared: true, .. } | Self::Qemu(Way { prepared: true, .. }) => {
                "prepared"
            }
            _ => "cold",
        }
    }

    pub fn encryption(&self) -> &'static str {
        match self {
            Self::Godwit {
                encrypted: true, ..
            }
            | Self::Cipher { .. } => "aes-256-gcm",
            Self::Qemu(Way { tls: true, .. }) => "tls",
            _ => "none",
        }
    }

    /// Whether it moves a guest, rather than showing a limit.
    pub fn moves(&self) -> bool {
        matches!(self, Self::Godwit { .. } | Self::Qemu(_))
    }

    /// What the table has and a filter is looked for in: name, config, encryption and destination.
    pub fn described(&self) -> String {
        let (name, config) = (self.name(), self.config());
        format!(
            "{name} {config} {} {}",
            self.encryption(),
            self.destination()
        )
    }
}
