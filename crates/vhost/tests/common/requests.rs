//! A driver's requests, and where their parts are in its memory.

use super::{FREE, Part, Site, into, out};

pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Where a request's header, its data and its status are, one place for each number.
#[derive(Clone, Copy)]
pub struct Places {
    pub header: u64,
    pub status: u64,
    pub data: u64,
}

pub fn places(number: u64) -> Places {
    let base = FREE + number * 16384;
    Places {
        header: base,
        status: base + 64,
        data: base + 4096,
    }
}

impl Site {
    /// The buffers of a request; its status is 77 until it is answered.
    pub fn request(&self, number: u64, kind: u32, sector: u64, data: Option<Part>) -> Vec<Part> {
        let places = places(number);
        let mut header = [kind, 0].map(u32::to_le_bytes).concat();
        header.extend(sector.to_le_bytes());
        self.write(places.header, &header);
        self.write(places.status, &[77]);
        let parts = [
            Some(out(places.header, 16)),
            data,
            Some(into(places.status, 1)),
        ];
        parts.into_iter().flatten().collect()
    }

    pub fn write_of(&self, number: u64, sector: u64, fill: u8, len: u32) -> Vec<Part> {
        let at = places(number).data;
        self.write(at, &vec![fill; len as usize]);
        self.request(number, 1, sector, Some(out(at, len)))
    }

    /// A write of so many sectors in so many pieces.
    pub fn in_pieces(&self, number: u64, sectors: u32, pieces: u32) -> Vec<Part> {
        let whole = self.request(number, 1, 0, None);
        let at = places(number).data;
        let (bytes, each) = (sectors * 512, 16);
        let data = (0..pieces).map(|piece| match piece + 1 == pieces {
            true => out(at, bytes - piece * each),
            false => out(at, each),
        });
        [vec![whole[0]], data.collect(), vec![whole[1]]].concat()
    }

    pub fn read_of(&self, number: u64, sector: u64, len: u32) -> Vec<Part> {
        let data = into(places(number).data, len);
        self.request(number, 0, sector, Some(data))
    }

    pub fn status(&self, number: u64) -> u8 {
        self.read(places(number).status, 1)[0]
    }

    pub fn data(&self, number: u64, len: usize) -> Vec<u8> {
        self.read(places(number).data, len)
    }

    /// A discard, or zeroes, which may give storage back.
    pub fn erase_of(&self, number: u64, kind: u32, sector: u64, sectors: u32) -> Vec<Part> {
        let mut segment = sector.to_le_bytes().to_vec();
        segment.extend(sectors.to_le_bytes());
        segment.extend(u32::from(kind == WRITE_ZEROES).to_le_bytes());
        let at = places(number).data;
        self.write(at, &segment);
        self.request(number, kind, 0, Some(out(at, 16)))
    }
}
