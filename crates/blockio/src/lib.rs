//! A disk's requests on their way from the guest through filters to its image.
//!
//! What it is for: a [`Request`] enters a [`Stack`] at the top, goes down through [`Filter`]s, which may pass it on, hold it,
//! split it or answer it, and is carried out by the [`Engine`] on an [`Image`]; its [`Outcome`] comes up the same way. One
//! thread owns a stack and everything below it, so that a request passes no lock but those of a mirroring ([`filters::Course`],
//! [`SecondImage`]), which are held for a few instructions.
//!
//! Who owns the state: the guest owns its buffers, which a request lends to the kernel; an image's file belongs to whoever
//! holds its lock ([`Image::lock`]), and the kernel keeps that lock for as long as a request is under way, also when this
//! process has died.
//!
//! What it refuses: images whose device cannot write the guest's blocks, ranges outside of a disk, and to give back a buffer
//! that the kernel still uses.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("godwit-blockio needs 64-bit Linux");

mod approach;
mod arriving;
mod bell;
mod bound;
mod buffer;
pub mod delta;
mod engine;
mod error;
mod estimate;
mod filter;
pub mod filters;
mod flatten;
mod frozen;
pub mod grow;
pub mod holder;
mod holes;
mod image;
mod image_lock;
mod kept_room;
pub mod label;
mod last_blocks;
mod layers;
mod reactor;
mod request;
mod second_image;
mod stack;
mod under_way;

pub use approach::{Approach, NO_NEARER, NOT_KEPT_UP, Nearer, Progress, switch_over};
pub use arriving::{Arriving, stride_of};
pub use bell::Bell;
pub use bound::Bound;
pub use buffer::Buffer;
pub use engine::Engine;
pub use error::Error;
pub use filter::{Filter, Flow};
pub use flatten::{Chain, flatten};
pub use frozen::{Copied, Frozen};
pub use holes::{data_in_regions, next_data};
pub use image::{Access, Alignment, Identity, Image, Known};
pub use image_lock::{release as unlock_file, take as lock_file};

pub use last_blocks::{Closed, LastBlocks};
pub use reactor::Event;
use reactor::Reactor;
pub use request::{Data, Outcome, Request, Waits, Work};
pub use second_image::SecondImage;
pub use stack::{Bottom, Finished, Stack};

/// Bytes in a sector, the unit in which virtio counts, whatever a disk's block size.
pub const SECTOR: u64 = 512;
