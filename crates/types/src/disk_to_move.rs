//! A disk whose image goes along with its VM, and what becomes of one that is linked to another image.
//!
//! Pure data. A linked disk stays linked where its destination has the same image; else it becomes one image there, with all that it reads.
//! Refuses nothing.

use crate::HostName;
use serde::{Deserialize, Serialize};

/// A disk whose image goes along with its VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskToMove {
    /// Its name within the VM.
    pub name: String,
    /// What the guest sees as its size.
    pub bytes: u64,
    /// Bytes that its image occupies at the source.
    #[serde(default)]
    pub used_bytes: u64,
    /// Whether it consists of several images there, too, since it has snapshots, or images of deleted ones that are not merged yet, or is linked to
    /// another image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layered: bool,
    /// What it is linked to at the source. Without `layered` it becomes one image at the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked: Option<LinkedTo>,
}

/// The image that a linked disk begins as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedTo {
    /// Where it lies, on each host that has it.
    pub path: String,
    /// The number that it bears.
    pub id: String,
    /// Bytes that it occupies at the source.
    #[serde(default)]
    pub used_bytes: u64,
    /// Whether the disk has snapshots, with which it does not become one image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_snapshots: bool,
}

impl DiskToMove {
    /// The same where it does not stay linked; one with snapshots stays as it is, and does not go along.
    #[must_use]
    pub fn as_one_image(&self) -> Self {
        match &self.linked {
            Some(linked) if !linked.has_snapshots => Self {
                layered: false,
                used_bytes: self
                    .used_bytes
                    .saturating_add(linked.used_bytes)
                    .min(self.bytes),
                ..self.clone()
            },
            _ => self.clone(),
        }
    }

    /// Whether its migration was told that it is linked to the image of this path and number.
    pub fn is_linked_to(&self, path: &str, id: &str) -> bool {
        let linked = self.linked.as_ref();
        linked.is_some_and(|linked| (&*linked.path, &*linked.id) == (path, id))
    }

    /// What it was linked to, if it becomes one image.
    pub fn becomes_one(&self) -> Option<&LinkedTo> {
        self.linked.as_ref().filter(|_| !self.layered)
    }

    /// What a person is told of one that becomes one image.
    pub fn told_as_one(&self, to: &HostName) -> Option<String> {
        let linked = self.becomes_one()?;
        Some(format!(
            "disk '{}' is linked to the image {}, which host '{to}' does not have as the disk knows it: there it is one image with all its content, and not linked any more",
            self.name, linked.path
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(has_snapshots: bool) -> DiskToMove {
        DiskToMove {
            name: "root".to_owned(),
            bytes: 4096,
            used_bytes: 1024,
            layered: true,
            linked: Some(LinkedTo {
                path: "/srv/base.raw".to_owned(),
                id: "7".repeat(32),
                used_bytes: 2048,
                has_snapshots,
            }),
        }
    }

    #[test]
    fn a_linked_disk_that_becomes_one_image_takes_what_both_took_and_no_more_than_it_is_long() {
        let to = HostName::new("b").unwrap();
        let mut linked = disk(false);
        assert_eq!(linked.told_as_one(&to), None);
        let one = linked.as_one_image();
        assert_eq!((one.layered, one.used_bytes), (false, 3072));
        let told = one.told_as_one(&to).unwrap();
        assert!(told.contains("/srv/base.raw") && told.contains("host 'b'"));
        linked.used_bytes = 4000;
        assert_eq!(linked.as_one_image().used_bytes, 4096);
    }

    #[test]
    fn one_with_snapshots_becomes_no_single_image_and_what_is_not_linked_stays_as_it_is() {
        let with_snapshots = disk(true);
        assert_eq!(with_snapshots.as_one_image(), with_snapshots);
        let mut other = disk(false);
        other.linked = None;
        assert_eq!(other.as_one_image(), other);
        assert_eq!(other.becomes_one(), None);
    }

    #[test]
    fn an_older_program_reads_what_it_knows_and_writes_nothing_of_a_link() {
        let text = r#"{"name":"root","bytes":4096,"used_bytes":1024,"layered":true}"#;
        let read: DiskToMove = serde_json::from_str(text).unwrap();
        assert_eq!(read.linked, None);
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        let linked = serde_json::to_string(&disk(false)).unwrap();
        assert_eq!(
            serde_json::from_str::<DiskToMove>(&linked).unwrap(),
            disk(false)
        );
    }
}
