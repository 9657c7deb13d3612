//! What is measured: cells, and the systems that take turns in each.
//!
//! Plain data. Refuses names of cells and systems that there are not.

use godwit_testkit::disk_load::Order;

/// Bytes of each disk, and of the image that they begin as.
pub const DISK_BYTES: u64 = 512 << 20;
/// How long a load runs that is measured.
pub const LOAD_S: f64 = 10.0;
/// Requests of each disk that are under way at a time.
pub const OUTSTANDING: usize = 16;
/// Of a hundred requests so many write; the others read, and compare.
pub const WRITE_PERCENT: u8 = 80;
/// Of a thousand requests so many flush.
pub const FLUSH_PERMILLE: u16 = 10;

/// Many disks write no faster than this each, in bytes a second: as guests that share storage, and as many bytes for each system.
const EACH_BYTES_PER_S: u64 = 1 << 20;

/// Who serves the disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// Deltas with pieces of 4 KiB.
    Godwit,
    /// qcow2 with clusters of 64 KiB, as qemu-img makes them.
    Clusters,
    /// qcow2 with clusters of 128 KiB, of which each part of 4 KiB is known (extended L2 entries).
    Subclusters,
}

impl System {
    pub const ALL: [Self; 3] = [Self::Godwit, Self::Clusters, Self::Subclusters];

    pub fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit 4k",
            Self::Clusters => "qcow2 64k",
            Self::Subclusters => "qcow2 128k/4k",
        }
    }

    /// As `qemu-img create -o` takes it.
    pub fn options(self) -> &'static str {
        match self {
            Self::Godwit | Self::Clusters => "cluster_size=64k",
            Self::Subclusters => "cluster_size=128k,extended_l2=on",
        }
    }
}

/// Disks under a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub disks: u32,
    pub order: Order,
    pub io_bytes: usize,
}

impl Cell {
    pub fn name(&self) -> String {
        let order = match self.order {
            Order::Sequential => "sequential",
            Order::Random | Order::Skewed => "random",
        };
        format!("{}-{order}-{}k", self.disks, self.io_bytes >> 10)
    }

    /// Requests a second of each disk; none: as many as it answers.
    pub fn per_second(&self) -> Option<u32> {
        let each = EACH_BYTES_PER_S / self.io_bytes as u64;
        (self.disks > 1).then(|| u32::try_from(each.max(1)).unwrap_or(u32::MAX))
    }
}

/// The cells whose names begin with one of these, and the systems whose names hold one of those; all where there are none.
pub fn chosen(cells: &[String], systems: &[String]) -> Result<(Vec<Cell>, Vec<System>), String> {
    let mut all = Vec::new();
    for disks in [1, 30] {
        for order in [Order::Random, Order::Sequential] {
            for io_bytes in [4 << 10, 64 << 10] {
                all.push(Cell {
                    disks,
                    order,
                    io_bytes,
                });
            }
        }
    }
    let begins = |cell: &Cell| cells.iter().any(|name| cell.name().starts_with(name));
    all.retain(|cell| cells.is_empty() || begins(cell));
    let has = |system: &System| systems.iter().any(|text| system.name().contains(text));
    let chosen = System::ALL.into_iter();
    let chosen: Vec<_> = chosen
        .filter(|system| systems.is_empty() || has(system))
        .collect();
    match all.is_empty() || chosen.is_empty() {
        true => Err("no such cell or system: --plan lists them".to_owned()),
        false => Ok((all, chosen)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_and_systems_are_chosen_by_name_and_many_disks_write_the_same_bytes() {
        let text = |one: &str| vec![one.to_owned()];
        let (cells, systems) = chosen(&[], &[]).unwrap();
        assert_eq!((cells.len(), systems.len()), (8, 3));
        let (cells, systems) = chosen(&text("30-random"), &text("godwit")).unwrap();
        assert_eq!(systems, [System::Godwit]);
        let rates: Vec<_> = cells.iter().map(Cell::per_second).collect();
        assert_eq!(rates, [Some(256), Some(16)]);
        assert!(chosen(&text("31"), &[]).is_err() && chosen(&[], &text("vdi")).is_err());
    }
}
