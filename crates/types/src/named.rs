//! Enums whose values have names: for tables, traces and command lines.
//!
//! Owns nothing. Refuses: a value without a name.

/// Declares such an enum, with all its values in order, their names, and the way back.
#[macro_export]
macro_rules! named {
    ($(#[$about:meta])* $see:vis enum $kind:ident {
        $($(#[$doc:meta])* $value:ident => $name:literal),+ $(,)?
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $see enum $kind { $($(#[$doc])* $value),+ }

        impl $kind {
            /// Every value, in the order of its declaration.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            /// What stands in tables and on command lines.
            pub fn name(self) -> &'static str {
                match self { $(Self::$value => $name),+ }
            }

            /// The value that is called so.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name)
            }
        }
    };
}
