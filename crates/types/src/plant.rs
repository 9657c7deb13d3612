//! Planted faults: steps left out or done too early, which a named test must notice (`make plant-faults`).
//!
//! Owns nothing: `GODWIT_PLANT` in the environment names the one that is planted. Without the feature `planted-faults`, which
//! no product build has, none is.

/// Whether this fault is planted.
#[cfg(feature = "planted-faults")]
pub fn planted(fault: &str) -> bool {
    static PLANT: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let plant = PLANT.get_or_init(|| std::env::var("GODWIT_PLANT").ok());
    plant.as_deref() == Some(fault)
}

/// As above: none is.
#[cfg(not(feature = "planted-faults"))]
#[inline(always)]
pub fn planted(_fault: &str) -> bool {
    false
}
