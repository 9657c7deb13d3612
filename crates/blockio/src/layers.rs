//! The deltas above a disk's image, or above another one that a linked disk begins as, as what carries requests out has them.
//!
//! Who owns the state: the engine; they come and go only while the kernel has no request. Refuses nothing.

use crate::Image;
use crate::delta::Delta;
use crate::request::Place;

/// From the lowest to the top.
#[derive(Debug, Default)]
pub(crate) struct Layers(pub(crate) Vec<Delta>);

impl Layers {
    /// The file of this place, and where in it byte 0 of a request is. What is nowhere is the image, in which nothing of it is.
    pub(crate) fn at<'a>(&'a self, place: Place, own: &'a Image) -> (&'a Image, u64) {
        let layer = |number: usize| self.0.get(number.wrapping_sub(1));
        match place {
            Place::Own => (self.lowest(own), 0),
            Place::Layer(number) => match layer(number) {
                Some(delta) => (delta.image(), delta.layout().data_at()),
                None => (own, u64::MAX),
            },
            Place::Inside(number) => match layer(number) {
                Some(delta) => (delta.image(), 0),
                None => (own, u64::MAX),
            },
        }
    }

    /// What is read where no delta has anything.
    fn lowest<'a>(&'a self, own: &'a Image) -> &'a Image {
        let begins_as = self.0.first().and_then(Delta::begins_as);
        begins_as.unwrap_or(own)
    }
}
