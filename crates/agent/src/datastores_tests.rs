//! What is refused before a VM process hears of it.

use super::*;

struct House {
    directory: tempfile::TempDir,
    spec: VmSpec,
    stores: Datastores,
}

fn store(name: &str) -> DatastoreName {
    DatastoreName::new(name).unwrap()
}

impl House {
    /// VM web with disks `root` and `data` in `slow`, and `iso`, which it only reads; `fast` holds nothing.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = VmSpec::placeholder(&VmName::new("web").unwrap());
        for name in ["slow", "fast"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        for name in ["root", "data", "iso"] {
            let image = path(&format!("slow/{name}.raw"));
            std::fs::write(&image, [1; 4096]).unwrap();
            spec.disks.push(DiskSpec {
                read_only: name == "iso",
                ..DiskSpec::new(name, image)
            });
        }
        let stores = ["slow", "fast", "gone"].map(|name| {
            let shared = name == "fast";
            let path = path(name);
            (store(name), Datastore { path, shared })
        });
        Self {
            stores: stores.into(),
            directory,
            spec,
        }
    }

    fn places(&self, disks: &[&str], to: &str) -> Result<Vec<DiskPlace>, ApiError> {
        let disks = disks.iter().map(|disk| (*disk).to_owned()).collect();
        let wish = MoveDisks {
            disks,
            to: store(to),
        };
        places(
            &HostName::new("a").unwrap(),
            &self.stores,
            &self.spec,
            &wish,
        )
    }

    fn refuses(&self, disks: &[&str], to: &str, words: &[&str]) {
        let error = self.places(disks, to).unwrap_err();
        for word in words {
            assert!(error.message.contains(word), "{word:?}: {error:?}");
        }
    }
}

#[test]
fn every_disk_that_the_guest_writes_gets_a_place_of_its_own() {
    let house = House::new();
    let places = house.places(&[], "fast").unwrap();
    let named: Vec<&str> = places.iter().map(|place| place.disk.as_str()).collect();
    assert_eq!(named, ["root", "data"]);
    assert!(places[0].path.ends_with("/fast/web-root.raw"));
    assert!(places.iter().all(|place| place.shared));
    let one = house.places(&["data"], "fast").unwrap();
    assert_eq!(one, places[1..]);
}

#[test]
fn what_cannot_be_is_refused_in_a_sentence_that_says_what_to_do() {
    let house = House::new();
    house.refuses(
        &[],
        "tape",
        &[
            "no datastore 'tape'",
            "it has fast, gone, slow",
            "tape = { path",
        ],
    );
    house.refuses(
        &[],
        "gone",
        &["'gone' of host 'a' is not there", "mount it"],
    );
    house.refuses(
        &["root"],
        "slow",
        &["in datastore 'slow' of host 'a' already"],
    );
    house.refuses(&["swap"], "fast", &["VM 'web' has no disk 'swap'"]);
    house.refuses(&["iso"], "fast", &["only reads disk 'iso'"]);
    house.refuses(&["root", "root"], "fast", &["named twice"]);
    let path = house.directory.path().join("fast/web-data.raw");
    std::fs::write(path, "").unwrap();
    house.refuses(&[], "fast", &["web-data.raw", "a file is at"]);
}

#[test]
fn a_datastore_that_is_a_file_or_too_small_is_refused() {
    let mut house = House::new();
    let path = house.spec.disks[0].path.clone();
    house.stores.insert(
        store("file"),
        Datastore {
            path,
            shared: false,
        },
    );
    house.refuses(&[], "file", &["is no directory"]);
    // It cannot be written, and has no room either.
    let path = "/proc".to_owned();
    house.stores.insert(
        store("proc"),
        Datastore {
            path,
            shared: false,
        },
    );
    house.refuses(&[], "proc", &["0 MiB free"]);
}
