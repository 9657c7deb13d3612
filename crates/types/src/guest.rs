//! What a guest says of itself through its agent.
//!
//! Plain data, bounded where it is made and again where it is read: a guest chooses the words. Nothing is decided by it. Refuses: nothing; what is
//! too long is cut, what would steer a terminal is blank.

use crate::text::{cut, steers};
use serde::{Deserialize, Deserializer, Serialize};
use std::net::IpAddr;
use utoipa::ToSchema;

/// Longest word of a guest that is kept, bytes.
const WORD_LEN_MAX: usize = 128;
/// Most cards that are told, and most addresses of one.
pub const CARDS_MAX: usize = 16;
pub const ADDRESSES_MAX: usize = 16;

/// A guest in its own words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestInfo {
    /// What it is called.
    #[serde(
        default,
        deserialize_with = "read_word",
        skip_serializing_if = "Option::is_none"
    )]
    pub hostname: Option<String>,
    /// Its operating system, such as `Debian GNU/Linux 12 (bookworm)`.
    #[serde(
        default,
        deserialize_with = "read_word",
        skip_serializing_if = "Option::is_none"
    )]
    pub os: Option<String>,
    /// Its cards that have addresses others could reach.
    #[serde(
        default,
        deserialize_with = "read_cards",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub cards: Vec<GuestCard>,
}

/// A card as its guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestCard {
    /// The guest's name of it, such as `eth0`.
    #[serde(deserialize_with = "read_name")]
    pub name: String,
    #[serde(
        default,
        deserialize_with = "read_word",
        skip_serializing_if = "Option::is_none"
    )]
    pub mac: Option<String>,
    #[serde(default, deserialize_with = "read_addresses")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
}

/// A guest's word, fit to be shown; nothing of an empty one.
pub fn word(text: &str) -> Option<String> {
    let begin: String = text.chars().take(WORD_LEN_MAX + 1).collect();
    let mut word = begin.replace(steers, " ").trim().to_owned();
    cut(&mut word, WORD_LEN_MAX);
    (!word.is_empty()).then_some(word)
}

fn read_word<'de, D: Deserializer<'de>>(text: D) -> Result<Option<String>, D::Error> {
    let text = Option::<String>::deserialize(text)?;
    Ok(text.as_deref().and_then(word))
}

fn read_name<'de, D: Deserializer<'de>>(text: D) -> Result<String, D::Error> {
    Ok(word(&String::deserialize(text)?).unwrap_or_default())
}

fn read_cards<'de, D: Deserializer<'de>>(cards: D) -> Result<Vec<GuestCard>, D::Error> {
    let mut cards = Vec::deserialize(cards)?;
    cards.truncate(CARDS_MAX);
    Ok(cards)
}

fn read_addresses<'de, D: Deserializer<'de>>(addresses: D) -> Result<Vec<IpAddr>, D::Error> {
    let mut addresses = Vec::deserialize(addresses)?;
    addresses.truncate(ADDRESSES_MAX);
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_guest_says_is_bounded_where_it_is_read() {
        let address = "192.0.2.1";
        let card = json!({"name": "e\n0", "mac": "", "addresses": vec![address; 99]});
        let said =
            json!({"hostname": "\u{1b}[2Jweb", "os": "x".repeat(9000), "cards": vec![card; 99]});
        let read: GuestInfo = serde_json::from_value(said).unwrap();
        assert_eq!(read.hostname.as_deref(), Some("[2Jweb"));
        assert_eq!(read.os.unwrap().len(), WORD_LEN_MAX);
        assert_eq!(read.cards.len(), CARDS_MAX);
        let card = &read.cards[0];
        assert_eq!(
            (
                card.name.as_str(),
                card.mac.as_deref(),
                card.addresses.len()
            ),
            ("e 0", None, ADDRESSES_MAX)
        );
    }

    #[test]
    fn a_guest_that_says_nothing_is_told_without_a_word() {
        assert_eq!(serde_json::to_string(&GuestInfo::default()).unwrap(), "{}");
    }
}
