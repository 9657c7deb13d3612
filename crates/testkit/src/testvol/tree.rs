//! The names and nodes of a test volume: as readers see them now, and as a power cut would leave them.
//!
//! Owns all nodes. What happened to names since the last sync is a list of changes in the order in which they were made;
//! a change is kept or lost whole, so that a rename is atomic. Syncing a directory makes the changes durable that touch
//! it, with all earlier ones of the same names, and no others. Refuses what has no room and names that are not there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::content::{Content, PAGE_BYTES};
use super::{Chance, Errno};

/// Number of the directory at the top.
pub const ROOT: u64 = 1;
/// Nodes that may be left over before they are looked for.
const LEFT_OVER: usize = 1024;

pub type Name = Vec<u8>;

/// What is stored of a node beside its content.
#[derive(Clone, Debug)]
pub struct Meta {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub accessed: Duration,
    pub modified: Duration,
    pub changed: Duration,
    /// Extended ones, by their names.
    pub attributes: BTreeMap<Name, Vec<u8>>,
}

#[derive(Debug)]
pub enum Body {
    File(Content),
    Directory(Directory),
    Link(Vec<u8>),
    /// A socket, a pipe or a device, of which only the number is stored.
    Special(u32),
}

#[derive(Debug, Default)]
pub struct Directory {
    pub now: BTreeMap<Name, u64>,
    durable: BTreeMap<Name, u64>,
}

#[derive(Debug)]
pub struct Node {
    /// What programs are told as its number; that by which the kernel knows it is another one after each power cut.
    pub inode: u64,
    pub meta: Meta,
    durable_meta: Meta,
    pub body: Body,
    /// Names that it has now.
    pub links: u32,
    /// How often the kernel was told of it and has not forgotten it.
    told: u64,
}

/// What one name of one directory becomes.
#[derive(Clone, Debug)]
struct Becomes {
    directory: u64,
    name: Name,
    node: Option<u64>,
}

type Change = Vec<Becomes>;

#[derive(Debug)]
pub struct Tree {
    nodes: HashMap<u64, Node>,
    next: u64,
    /// Changes of names that are not durable, oldest first.
    pending: Vec<Change>,
    swept: usize,
    /// Bytes that all nodes may take together.
    pub capacity: Option<u64>,
}

/// Time since the epoch.
pub fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

impl Meta {
    pub fn new(mode: u32, uid: u32, gid: u32) -> Self {
        let now = now();
        Self {
            mode,
            uid,
            gid,
            accessed: now,
            modified: now,
            changed: now,
            attributes: BTreeMap::new(),
        }
    }
}

impl Node {
    fn new(inode: u64, meta: Meta, body: Body) -> Self {
        Self {
            inode,
            durable_meta: meta.clone(),
            meta,
            body,
            links: 1,
            told: 0,
        }
    }

    pub fn size(&self) -> u64 {
        match &self.body {
            Body::File(content) => content.size(),
            Body::Link(target) => target.len() as u64,
            Body::Directory(_) | Body::Special(_) => 0,
        }
    }

    /// Pages that it takes, one of them for itself.
    pub fn pages(&self) -> u64 {
        match &self.body {
            Body::File(content) => 1 + content.pages(),
            _ => 1,
        }
    }
}

impl Default for Tree {
    fn default() -> Self {
        let root = Node::new(
            ROOT,
            Meta::new(libc::S_IFDIR | 0o755, 0, 0),
            Body::Directory(Directory::default()),
        );
        Self {
            nodes: HashMap::from([(ROOT, root)]),
            next: ROOT + 1,
            pending: Vec::new(),
            swept: 1,
            capacity: None,
        }
    }
}

impl Tree {
    pub fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.nodes.get(&number).ok_or(libc::ESTALE)
    }

    pub fn node_mut(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&number).ok_or(libc::ESTALE)
    }

    pub fn directory(&self, number: u64) -> Result<&Directory, Errno> {
        match &self.node(number)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(libc::ENOTDIR),
        }
    }

    pub fn content_mut(&mut self, number: u64) -> Result<&mut Content, Errno> {
        match &mut self.node_mut(number)?.body {
            Body::File(content) => Ok(content),
            _ => Err(libc::EINVAL),
        }
    }

    pub fn lookup(&self, directory: u64, name: &[u8]) -> Result<u64, Errno> {
        let found = self.directory(directory)?.now.get(name).copied();
        found.ok_or(libc::ENOENT)
    }

    /// The kernel was told of a node.
    pub fn told(&mut self, number: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.told += 1;
        }
    }

    /// The kernel has forgotten so many tellings of a node.
    pub fn forgotten(&mut self, number: u64, times: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.told = node.told.saturating_sub(times);
        }
    }

    /// Bytes taken by what has a name: when the kernel lets go of what has none is not for a test to know.
    pub fn used(&self) -> u64 {
        let named = self.nodes.values().filter(|node| node.links > 0);
        let pages: u64 = named.map(Node::pages).sum();
        pages * PAGE_BYTES
    }

    fn room_for(&self, pages: u64) -> Result<(), Errno> {
        match self.capacity {
            Some(capacity) if pages > 0 && self.used() + pages * PAGE_BYTES > capacity => {
                Err(libc::ENOSPC)
            }
            _ => Ok(()),
        }
    }

    pub fn make(
        &mut self,
        directory: u64,
        name: &[u8],
        meta: Meta,
        body: Body,
    ) -> Result<u64, Errno> {
        if self.directory(directory)?.now.contains_key(name) {
            return Err(libc::EEXIST);
        }
        self.room_for(1)?;
        self.sweep();
        let number = self.next;
        self.next += 1;
        self.nodes.insert(number, Node::new(number, meta, body));
        self.change(vec![becomes(directory, name, Some(number))])?;
        Ok(number)
    }

    pub fn link(&mut self, number: u64, directory: u64, name: &[u8]) -> Result<(), Errno> {
        if self.directory(directory)?.now.contains_key(name) {
            return Err(libc::EEXIST);
        }
        self.node_mut(number)?.links += 1;
        self.change(vec![becomes(directory, name, Some(number))])
    }

    pub fn unlink(&mut self, directory: u64, name: &[u8]) -> Result<(), Errno> {
        let number = self.lookup(directory, name)?;
        self.check_empty(number)?;
        self.lose_name(number);
        self.change(vec![becomes(directory, name, None)])
    }

    fn check_empty(&self, number: u64) -> Result<(), Errno> {
        match &self.node(number)?.body {
            Body::Directory(directory) if !directory.now.is_empty() => Err(libc::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    fn lose_name(&mut self, number: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.links = node.links.saturating_sub(1);
            node.meta.changed = now();
        }
    }

    /// Gives a node another name, in place of what has that name.
    pub fn rename(
        &mut self,
        from: (u64, &[u8]),
        to: (u64, &[u8]),
        flags: u32,
    ) -> Result<(), Errno> {
        let number = self.lookup(from.0, from.1)?;
        let replaced = self.directory(to.0)?.now.get(to.1).copied();
        if flags & libc::RENAME_EXCHANGE != 0 {
            let other = replaced.ok_or(libc::ENOENT)?;
            return self.change(vec![
                becomes(from.0, from.1, Some(other)),
                becomes(to.0, to.1, Some(number)),
            ]);
        }
        match replaced {
            Some(_) if flags & libc::RENAME_NOREPLACE != 0 => return Err(libc::EEXIST),
            Some(same) if same == number => return Ok(()),
            Some(other) => {
                self.check_empty(other)?;
                self.lose_name(other);
            }
            None => {}
        }
        self.change(vec![
            becomes(from.0, from.1, None),
            becomes(to.0, to.1, Some(number)),
        ])
    }

    /// Lets readers see a change, which becomes durable later or not at all.
    fn change(&mut self, change: Change) -> Result<(), Errno> {
        for entry in &change {
            let node = self.node_mut(entry.directory)?;
            let Body::Directory(directory) = &mut node.body else {
                return Err(libc::ENOTDIR);
            };
            match entry.node {
                Some(number) => directory.now.insert(entry.name.clone(), number),
                None => directory.now.remove(&entry.name),
            };
            node.meta.modified = now();
            node.meta.changed = node.meta.modified;
        }
        self.pending.push(change);
        Ok(())
    }

    pub fn write(&mut self, number: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let end = offset.checked_add(data.len() as u64).ok_or(libc::EFBIG)?;
        if end > i64::MAX as u64 {
            return Err(libc::EFBIG);
        }
        let missing = self
            .content_mut(number)?
            .pages_missing(offset, data.len() as u64);
        self.room_for(missing)?;
        self.content_mut(number)?.write(offset, data);
        let meta = &mut self.node_mut(number)?.meta;
        meta.modified = now();
        meta.changed = meta.modified;
        Ok(())
    }

    /// Makes a node durable: a file's content, or the changes of names that touch a directory.
    pub fn sync(&mut self, number: u64, data_alone: bool) -> Result<(), Errno> {
        let node = self.node_mut(number)?;
        let mut meta = node.meta.clone();
        if data_alone {
            meta.attributes = std::mem::take(&mut node.durable_meta.attributes);
        }
        node.durable_meta = meta;
        match &mut node.body {
            Body::File(content) => content.sync(),
            Body::Directory(_) => {
                let touches = |change: &Change| change.iter().any(|e| e.directory == number);
                let wanted = self.pending.iter().map(touches).collect();
                self.settle(wanted);
            }
            Body::Link(_) | Body::Special(_) => {}
        }
        Ok(())
    }

    /// Makes the wanted changes durable, with every earlier one of the same names; the others stay as they are.
    fn settle(&mut self, mut wanted: Vec<bool>) {
        let mut names = HashSet::new();
        for (change, wanted) in self.pending.iter().zip(&mut wanted).rev() {
            let keys = || change.iter().map(|e| (e.directory, e.name.as_slice()));
            if *wanted || keys().any(|key| names.contains(&key)) {
                *wanted = true;
                names.extend(keys());
            }
        }
        let mut kept = Vec::new();
        for (change, wanted) in std::mem::take(&mut self.pending).into_iter().zip(wanted) {
            if !wanted {
                kept.push(change);
                continue;
            }
            for entry in change {
                let Some(Node {
                    body: Body::Directory(directory),
                    ..
                }) = self.nodes.get_mut(&entry.directory)
                else {
                    continue;
                };
                match entry.node {
                    Some(node) => directory.durable.insert(entry.name, node),
                    None => directory.durable.remove(&entry.name),
                };
            }
        }
        self.pending = kept;
    }

    /// Lets readers see what a power cut left. Every node but the top gets a new number, so that whoever still has an
    /// old one is refused.
    pub fn cut(&mut self, chance: &mut Chance) {
        let count = self.pending.len();
        self.settle(chance.changes(count));
        self.pending.clear();
        let mut old = std::mem::take(&mut self.nodes);
        let mut numbers = HashMap::from([(ROOT, ROOT)]);
        let mut left = vec![ROOT];
        while let Some(number) = left.pop() {
            let Some(mut node) = old.remove(&number) else {
                continue;
            };
            node.meta = node.durable_meta.clone();
            node.told = 0;
            node.links = 1;
            match &mut node.body {
                Body::File(content) => content.cut(&mut chance.for_file()),
                Body::Directory(directory) => {
                    for child in directory.durable.values_mut() {
                        let next = &mut self.next;
                        *child = *numbers.entry(*child).or_insert_with_key(|old| {
                            left.push(*old);
                            *next += 1;
                            *next - 1
                        });
                    }
                    directory.now = directory.durable.clone();
                }
                Body::Link(_) | Body::Special(_) => {}
            }
            if let Some(number) = numbers.get(&number) {
                self.nodes.insert(*number, node);
            }
        }
        self.count_links();
    }

    fn count_links(&mut self) {
        let mut links = HashMap::from([(ROOT, 1)]);
        for node in self.nodes.values() {
            if let Body::Directory(directory) = &node.body {
                for child in directory.now.values() {
                    *links.entry(*child).or_insert(0) += 1;
                }
            }
        }
        for (number, node) in &mut self.nodes {
            node.links = links.get(number).copied().unwrap_or(0);
        }
    }

    /// Forgets nodes that have no name, now or after a power cut, and are not open.
    fn sweep(&mut self) {
        if self.nodes.len() < 2 * self.swept + LEFT_OVER {
            return;
        }
        let mut named: HashSet<u64> = HashSet::from([ROOT]);
        named.extend(self.pending.iter().flatten().filter_map(|e| e.node));
        for node in self.nodes.values() {
            if let Body::Directory(directory) = &node.body {
                named.extend(directory.now.values().chain(directory.durable.values()));
            }
        }
        self.nodes
            .retain(|number, node| node.told > 0 || named.contains(number));
        self.swept = self.nodes.len();
    }
}

fn becomes(directory: u64, name: &[u8], node: Option<u64>) -> Becomes {
    Becomes {
        directory,
        name: name.to_vec(),
        node,
    }
}
