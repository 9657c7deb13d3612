//! Guest memory as a device of ours sees it: by guest-physical addresses, while the guest runs.
//!
//! What it is for: a device reads and writes its rings and small structures through [`DeviceMemory`], which is a guest
//! memory of crate `vm-memory`; the buffers of a request it lends to the kernel as vectors, those that the kernel reads
//! ([`DeviceReadable`]) apart from those that it writes ([`DeviceWritable`]).
//!
//! Every write is told to the RAM file's trackers after it was done, by the value through which it was made. What no value
//! can see to, its user must: a [`DeviceWritable`] that was lent is kept until the kernel is done with it, and devices rest
//! before the last look at what was written. Pointers of a [`VolatileSlice`] are not for writing. No page is claimed: two
//! requests of a guest may name the same buffer, as they may on hardware.
//!
//! Who owns the state: the guest owns the bytes; each value here keeps the RAM file's mapping alive. Refuses: regions that
//! overlap or are not in the RAM file; addresses in none of them; more vectors than the kernel takes; memory for which there
//! is no room, which is made before it is touched, also to be read. A hypervisor that was taken over can take away memory
//! that was there, and so end this process by SIGBUS: that harms its own VM alone.

use std::ops::Range;
use std::sync::Arc;

use godwit_types::plant::planted;
use vm_memory::bitmap::{BS, Bitmap, RefSlice, WithBitmapSlice};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};

use crate::{AtomicPageSet, Error, PAGE_SIZE, RamFile};

/// Most regions of one guest: more than QEMU ever tells of.
pub const REGIONS_MAX: usize = 512;

/// Most vectors of one request: more the kernel refuses.
pub const VECTORS_MAX: usize = 1024;

/// All of a guest's memory that a device may use.
pub type DeviceMemory = GuestRegionCollection<DeviceRegion>;

/// Where a part of the RAM file is in the guest's physical memory, as a vhost-user front end says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPlace {
    /// Guest-physical address of its first byte.
    pub guest: u64,
    /// Offset of its first byte in the RAM file, a multiple of 4096.
    pub offset: u64,
    /// Its size in bytes, a multiple of 4096 and not 0.
    pub bytes: u64,
}

/// One contiguous part of a guest's physical memory.
#[derive(Debug)]
pub struct DeviceRegion {
    ram: Arc<RamFile>,
    guest: GuestAddress,
    /// Its bytes in the RAM file.
    span: Range<usize>,
}

/// A guest's memory at these places; what the front end says is checked.
pub fn device_memory(ram: &Arc<RamFile>, places: &[RegionPlace]) -> Result<DeviceMemory, Error> {
    if places.len() > REGIONS_MAX {
        return Err(Error::Regions {
            reason: format!("{} regions are more than {REGIONS_MAX}", places.len()),
        });
    }
    let regions: Result<Vec<DeviceRegion>, Error> =
        places.iter().map(|place| region(ram, place)).collect();
    let mut regions = regions?;
    regions.sort_by_key(|region| region.guest);
    DeviceMemory::from_regions(regions).map_err(|error| Error::Regions {
        reason: error.to_string(),
    })
}

fn region(ram: &Arc<RamFile>, place: &RegionPlace) -> Result<DeviceRegion, Error> {
    let refused = |why: &str| Error::Regions {
        reason: format!(
            "{} bytes at {:#x}, from byte {:#x} of guest RAM on: {why}",
            place.bytes, place.guest, place.offset
        ),
    };
    let page = PAGE_SIZE as u64;
    if place.bytes == 0
        || [place.guest, place.offset, place.bytes]
            .iter()
            .any(|number| !number.is_multiple_of(page))
    {
        return Err(refused("they are no whole pages"));
    }
    let end = place.offset.checked_add(place.bytes);
    let end = end.filter(|&end| end <= ram.byte_count());
    let end = end.ok_or_else(|| refused("guest RAM ends before"))?;
    if place.guest.checked_add(place.bytes).is_none() {
        return Err(refused("no address is that high"));
    }
    // The RAM file is mapped, so its offsets are addresses' sizes.
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::Size { bytes });
    Ok(DeviceRegion {
        ram: Arc::clone(ram),
        guest: GuestAddress(place.guest),
        span: size(place.offset)?..size(end)?,
    })
}

impl DeviceRegion {
    /// The bytes of the RAM file at so many bytes of this region.
    fn part(&self, at: MemoryRegionAddress, count: usize) -> Option<Range<usize>> {
        let start = usize::try_from(at.0).ok()?.checked_add(self.span.start)?;
        let end = start.checked_add(count)?;
        (end <= self.span.end).then_some(start..end)
    }
}

/// The pages that hold these bytes of the RAM file.
fn pages_of(bytes: &Range<usize>) -> Range<u64> {
    (bytes.start / PAGE_SIZE) as u64..bytes.end.div_ceil(PAGE_SIZE) as u64
}

impl GuestMemoryRegion for DeviceRegion {
    type B = AtomicPageSet;

    fn len(&self) -> GuestUsize {
        (self.span.end - self.span.start) as GuestUsize
    }

    fn start_addr(&self) -> GuestAddress {
        self.guest
    }

    fn bitmap(&self) -> BS<'_, Self::B> {
        self.ram.device_writes.slice_at(self.span.start)
    }

    /// Memory that is not there yet is made first.
    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, Self::B>>, GuestMemoryError> {
        let part = self.part(offset, count);
        let part = part.ok_or(GuestMemoryError::InvalidBackendAddress)?;
        let allocated = self.ram.allocate(pages_of(&part));
        allocated.map_err(|error| GuestMemoryError::IOError(std::io::Error::other(error)))?;
        let writes = self.ram.device_writes.slice_at(part.start);
        let (start, len) = self
            .ram
            .map
            .locate(&part)
            .ok_or(GuestMemoryError::InvalidBackendAddress)?;
        // SAFETY: the bytes are inside our mapping, which lives as long as `self`, from which the slice borrows. Who else uses
        // them is not this process, or goes by the rules of `SharedMap::lend` for bytes that change. `SharedMap::lend_mut`
        // is for the destination of a migration, where no device runs yet.
        Ok(unsafe { VolatileSlice::with_bitmap(start, len, writes, None) })
    }

    /// A whole region is never wanted, and would have to be made.
    fn as_volatile_slice(&self) -> Result<VolatileSlice<'_, BS<'_, Self::B>>, GuestMemoryError> {
        Err(GuestMemoryError::HostAddressNotAvailable)
    }
}

impl GuestMemoryRegionBytes for DeviceRegion {}

impl<'a> WithBitmapSlice<'a> for AtomicPageSet {
    type S = RefSlice<'a, Self>;
}

/// By bytes of the RAM file.
impl Bitmap for AtomicPageSet {
    fn mark_dirty(&self, offset: usize, len: usize) {
        // An element of a used ring, and its index.
        if matches!(len, 2 | 8) && planted("used-ring-not-marked") {
            return;
        }
        self.insert_range(pages_of(&(offset..offset.saturating_add(len))));
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.contains_all(pages_of(&(offset..offset.saturating_add(1))))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

/// Buffers of one request, in the guest's order, as the kernel takes them.
#[derive(Debug)]
struct Vectors {
    ram: Arc<RamFile>,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the pointers are into the mapping of `ram`, which is `Send` and `Sync` and lives as long as they do; nothing
// here follows them.
unsafe impl Send for Vectors {}

impl Vectors {
    fn new(ram: &Arc<RamFile>) -> Self {
        Self {
            ram: Arc::clone(ram),
            iovecs: Vec::new(),
        }
    }

    /// Adds `len` bytes at an address; all of them, or none.
    fn push(&mut self, memory: &DeviceMemory, address: u64, len: usize) -> Result<(), Error> {
        let before = self.iovecs.len();
        let pushed = self.push_parts(memory, address, len);
        if pushed.is_err() {
            self.iovecs.truncate(before);
        }
        pushed
    }

    fn push_parts(&mut self, memory: &DeviceMemory, address: u64, len: usize) -> Result<(), Error> {
        let outside = || Error::DeviceAddress { address, len };
        let (mut at, mut left) = (GuestAddress(address), len);
        while left > 0 {
            let (region, start) = memory.to_region_addr(at).ok_or_else(outside)?;
            if !Arc::ptr_eq(&region.ram, &self.ram) {
                return Err(outside());
            }
            let room = region.len().saturating_sub(start.0);
            let count = usize::try_from(room).unwrap_or(usize::MAX).min(left);
            let part = region.part(start, count).ok_or_else(outside)?;
            let (base, iov_len) = self.ram.map.locate(&part).ok_or_else(outside)?;
            if self.iovecs.len() >= VECTORS_MAX {
                return Err(Error::Vectors { max: VECTORS_MAX });
            }
            self.iovecs.push(libc::iovec {
                iov_base: base.cast(),
                iov_len,
            });
            left -= count;
            // No region ends at the highest address.
            at = GuestAddress(at.0.saturating_add(count as u64));
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.iovecs.iter().map(|iovec| iovec.iov_len).sum()
    }

    fn are_aligned(&self, address: usize, len: usize) -> bool {
        let odd = |number: usize, to: usize| to == 0 || !number.is_multiple_of(to);
        !self
            .iovecs
            .iter()
            .any(|iovec| odd(iovec.iov_base as usize, address) || odd(iovec.iov_len, len))
    }

    /// Goes through `len` bytes of the buffers after the first `skip`, piece by piece; memory that is not there yet is made
    /// first.
    fn each(
        &self,
        mut skip: usize,
        len: usize,
        mut piece: impl FnMut(*mut u8, Range<usize>),
    ) -> Result<(), Error> {
        let mut done = 0;
        for iovec in &self.iovecs {
            let before = skip.min(iovec.iov_len);
            skip -= before;
            let count = (iovec.iov_len - before).min(len - done);
            if count == 0 {
                continue;
            }
            let from = self.span(iovec).start.saturating_add(before);
            self.ram
                .allocate(pages_of(&(from..from.saturating_add(count))))?;
            let start = iovec.iov_base.cast::<u8>().wrapping_add(before);
            piece(start, done..done + count);
            done += count;
        }
        Ok(())
    }

    /// The bytes of the RAM file that a vector stands for.
    fn span(&self, iovec: &libc::iovec) -> Range<usize> {
        let base = self.ram.map.address() as usize;
        let start = (iovec.iov_base as usize).saturating_sub(base);
        start..start.saturating_add(iovec.iov_len)
    }
}

/// Buffers that the kernel reads from: what a guest writes to a disk.
#[derive(Debug)]
pub struct DeviceReadable(Vectors);

impl DeviceReadable {
    pub fn new(ram: &Arc<RamFile>) -> Self {
        Self(Vectors::new(ram))
    }

    /// Adds a guest's buffer.
    pub fn push(&mut self, memory: &DeviceMemory, address: u64, len: usize) -> Result<(), Error> {
        self.0.push(memory, address, len)
    }

    /// Copies the guest's bytes after the first `skip` into `to`, as many as there are on both sides: once, so that whoever
    /// gets the copy gets the same whatever the guest writes meanwhile.
    pub fn copy_to(&self, skip: usize, to: &mut [u8]) -> Result<(), Error> {
        self.0.each(skip, to.len(), |guest, span| {
            let part = &mut to[span];
            // SAFETY: `guest` is the start of as many bytes in our mapping as `part` has at most, which is memory of its own;
            // that the guest may change its bytes meanwhile is bearable as in `SharedMap::lend`: they are opaque.
            unsafe { std::ptr::copy_nonoverlapping(guest, part.as_mut_ptr(), part.len()) };
        })
    }

    /// As the kernel takes them; they are valid as long as `self` is not changed.
    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.0.iovecs
    }

    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Whether every buffer begins at a multiple of `address` here, and its length is one of `len`.
    pub fn are_aligned(&self, address: usize, len: usize) -> bool {
        self.0.are_aligned(address, len)
    }
}

/// Buffers that the kernel writes to: what a guest reads from a disk. Once they were lent their pages count as written from
/// [`Self::written`] on, or when the value is dropped, whatever came of the request.
#[derive(Debug)]
pub struct DeviceWritable {
    vectors: Vectors,
    lent: bool,
}

impl DeviceWritable {
    pub fn new(ram: &Arc<RamFile>) -> Self {
        Self {
            vectors: Vectors::new(ram),
            lent: false,
        }
    }

    /// Adds a guest's buffer.
    pub fn push(&mut self, memory: &DeviceMemory, address: u64, len: usize) -> Result<(), Error> {
        self.vectors.push(memory, address, len)
    }

    pub fn bytes(&self) -> usize {
        self.vectors.bytes()
    }

    /// Whether every buffer begins at a multiple of `address` here, and its length is one of `len`.
    pub fn are_aligned(&self, address: usize, len: usize) -> bool {
        self.vectors.are_aligned(address, len)
    }

    /// Copies bytes into the guest's buffers after their first `skip`, as many as there are on both sides.
    pub fn copy_from(&mut self, skip: usize, from: &[u8]) -> Result<(), Error> {
        self.lent = true;
        self.vectors.each(skip, from.len(), |guest, span| {
            let part = &from[span];
            // SAFETY: as in `DeviceReadable::copy_to`; the guest has given these bytes to be written.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), guest, part.len()) };
        })
    }

    /// As the kernel takes them; they are valid as long as `self` is not changed. It must be done with them before
    /// [`Self::written`], or the drop.
    pub fn lend(&mut self) -> &[libc::iovec] {
        self.lent = true;
        &self.vectors.iovecs
    }

    /// The kernel is done, or never began: tells of the pages if they were lent. The guest may be told of the request after
    /// this and not before.
    pub fn written(&mut self) {
        if std::mem::take(&mut self.lent) && !planted("data-not-marked") {
            let ram = &self.vectors.ram;
            for iovec in &self.vectors.iovecs {
                let pages = pages_of(&self.vectors.span(iovec));
                ram.device_writes.insert_range(pages);
            }
        }
    }
}

impl Drop for DeviceWritable {
    fn drop(&mut self) {
        self.written();
    }
}
