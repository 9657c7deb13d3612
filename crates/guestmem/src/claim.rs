//! Exclusive use of a range of pages within this process, released when dropped (also by a panic).

use std::ops::Range;

use crate::AtomicPageSet;

/// Proof that no other thread of this process writes these pages.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    claims: &'a AtomicPageSet,
    pages: Range<u64>,
}

impl<'a> Claim<'a> {
    /// Takes the pages, or nothing if any of them is taken.
    pub(crate) fn take(claims: &'a AtomicPageSet, pages: Range<u64>) -> Option<Self> {
        // Built only once the pages are taken: dropping a claim releases them.
        let taken = claims.try_claim(pages.clone());
        taken.then(|| Self { claims, pages })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.claims.remove_range(self.pages.clone());
    }
}
