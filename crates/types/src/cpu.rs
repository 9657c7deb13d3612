//! What a VM's description says of its CPU, and which models `auto` chooses from.
//!
//! Pure data and rules; what a host can give is the host's to say. Refuses: nothing.

/// CPU models for `auto` under KVM, greatest first. QEMU gives an unversioned name its first version on every machine
/// type here, so that it means the same everywhere.
pub const AUTO_MODELS: &[&str] = &[
    "EPYC-Genoa",
    "EPYC-Milan",
    "EPYC-Rome",
    "EPYC",
    "GraniteRapids",
    "SapphireRapids",
    "Icelake-Server-noTSX",
    "Icelake-Server",
    "Cascadelake-Server-noTSX",
    "Cascadelake-Server",
    "Skylake-Server-noTSX-IBRS",
    "Skylake-Server-IBRS",
    "Skylake-Server",
    "Broadwell-noTSX",
    "Broadwell",
    "Haswell-noTSX",
    "Haswell",
    "IvyBridge",
    "SandyBridge",
    "Westmere",
    "Nehalem",
    "Penryn",
    "Conroe",
    SAFE_MODEL,
];

/// What every QEMU gives every guest the same way: the choice under TCG, whose `max` differs between versions.
pub const SAFE_MODEL: &str = "qemu64";

/// Features that let a guest run guests of its own.
const NESTED: [&str; 2] = ["vmx", "svm"];

/// A CPU as a description gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuWish {
    /// QEMU's model, or `auto`.
    pub model: String,
    /// Features switched on or off beside the model.
    pub features: Vec<(String, bool)>,
}

impl CpuWish {
    /// Reads a CPU written as QEMU's users write it: `model,-one,+two,three=off`.
    pub fn parse(text: &str) -> Self {
        let mut parts = text.split(',');
        let model = parts.next().unwrap_or_default().to_owned();
        let feature = |part: &str| {
            let (name, on) = match part.split_once('=') {
                Some((name, "on")) => (name, true),
                Some((name, "off")) => (name, false),
                // With a value it is no name of a feature, and refused as that.
                _ => match part.strip_prefix('-') {
                    Some(name) => (name, false),
                    None => (part.strip_prefix('+').unwrap_or(part), true),
                },
            };
            (name.to_owned(), on)
        };
        let features = parts.map(feature).collect();
        Self { model, features }
    }

    /// Whether the model is whatever one host has, so that no other is sure to have it.
    pub fn is_of_one_host(&self) -> bool {
        matches!(self.model.as_str(), "host" | "max")
    }

    /// The feature with which the guest could run guests of its own, if one is switched on.
    pub fn nested(&self) -> Option<&str> {
        let mut features = self.features.iter();
        let found = features.find(|(name, on)| *on && NESTED.contains(&name.as_str()));
        found.map(|(name, _)| name.as_str())
    }

    /// Why a VM that may move cannot have a model that is whatever one host has.
    pub fn why_not_movable(&self, vm: &crate::VmName) -> String {
        format!(
            "VM {vm} has CPU model {}, which is whatever the host has, so no other host is sure to have it: set cpu = \"auto\", or movable = false for a VM that never moves",
            self.model
        )
    }
}

/// The greatest of the models that are chosen from among those that a host can give.
pub fn greatest(is_there: impl Fn(&str) -> bool) -> Option<&'static str> {
    AUTO_MODELS.iter().copied().find(|model| is_there(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_read_as_qemu_reads_it() {
        let wish = CpuWish::parse("EPYC,-one,+two,three=off,four=on,vendor=x");
        assert_eq!(wish.model, "EPYC");
        // The last is no name of a feature, and refused as that.
        let expected = [
            ("one", false),
            ("two", true),
            ("three", false),
            ("four", true),
            ("vendor=x", true),
        ];
        let expected = expected.map(|(name, on)| (name.to_owned(), on));
        assert_eq!(wish.features, expected);
    }

    #[test]
    fn nested_virtualisation_and_models_of_one_host_are_seen() {
        assert_eq!(CpuWish::parse("EPYC,+svm").nested(), Some("svm"));
        assert_eq!(CpuWish::parse("Haswell,vmx=off").nested(), None);
        assert!(CpuWish::parse("max,-avx").is_of_one_host());
        assert!(CpuWish::parse("host").is_of_one_host());
        assert!(!CpuWish::parse("auto").is_of_one_host());
    }
}
