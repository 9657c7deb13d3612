//! What the holders of a VM say of its images on shared storage, and who hears it.

mod common;

use common::{enrolled, host};
use godwit_site::{Book, Entry, Free, Heard, HostRow, Surveyed};
use godwit_types::image::{ImageId, KnownImage};
use godwit_types::site::{Claim, Instance, RecordSaid, SiteHeard, SurveyAnswer};
use godwit_types::{Generation, HostName, VmName};

fn web() -> VmName {
    VmName::new("web").unwrap()
}

fn life(of: &str, counter: u64) -> Instance {
    Instance {
        counter,
        boot_id: format!("boot-{counter}"),
        machine_id: of.to_owned(),
    }
}

fn known(image: u128, generation: u64, taken: u64) -> KnownImage {
    KnownImage {
        disk: "root".into(),
        image: ImageId::new(image),
        generation: Generation(generation),
        taken,
    }
}

struct Site {
    book: Book,
    generation: Generation,
}

impl Site {
    /// Hosts a, b and c; a holds the VM.
    fn new() -> Self {
        let mut site = Self {
            book: Book::default(),
            generation: Generation(0),
        };
        for name in ["a", "b", "c"] {
            site.book.add_host(enrolled(name), HostRow::default());
            site.polled((name, 2), Claim::No, &[]);
        }
        site.starts_on("a");
        site
    }

    fn starts_on(&mut self, name: &str) {
        let free = self.survey(&[host(name)], &|_| (Claim::No, Vec::new()));
        let free: Free = match free {
            Surveyed::Free(free) => free,
            other => panic!("{other:?}"),
        };
        let grant = self.book.grant(free, &host(name)).unwrap();
        self.generation = grant.generation;
    }

    fn survey(
        &mut self,
        on: &[HostName],
        says: &dyn Fn(&HostName) -> (Claim, Vec<KnownImage>),
    ) -> Surveyed {
        let survey = self.book.begin_survey(&web(), on).unwrap();
        let asked = survey.hosts.iter();
        let answers = asked.map(|host| {
            let (claim, images) = says(host);
            let answer = SurveyAnswer {
                highest: survey.level,
                may_live: false,
                claim,
                instance: life(host.as_str(), 2),
                knows: self.knows(),
                images,
            };
            (host.clone(), answer)
        });
        let answers = answers.collect();
        self.book.take_survey(&survey, &answers)
    }

    fn knows(&self) -> SiteHeard {
        SiteHeard {
            stamp: self.book.stamp(),
            complete: self.book.stamp(),
        }
    }

    fn polled(&mut self, (name, counter): (&str, u64), claim: Claim, images: &[KnownImage]) {
        let record = RecordSaid {
            vm: web(),
            highest: self.generation,
            may_live: true,
            claim,
            images: images.to_vec(),
        };
        let heard = Heard {
            instance: life(name, counter),
            knows: self.knows(),
            records: vec![record],
        };
        let ticket = self.book.ask();
        self.book.hear(&host(name), ticket, heard);
    }

    fn holds(&self) -> Claim {
        let (generation, on) = (self.generation, true);
        Claim::Holds { generation, on }
    }

    fn a_says(&mut self, images: &[KnownImage]) {
        self.polled(("a", 2), self.holds(), images);
    }

    fn images(&self) -> Vec<KnownImage> {
        self.book.images(&web())
    }
}

#[test]
fn the_next_holder_hears_what_the_one_before_it_knew() {
    let mut site = Site::new();
    let held = site.generation.0;
    site.a_says(&[known(1, held, 4)]);
    // What a poll missed, since the VM was started again and is off already, the survey hears.
    let (generation, on) = (site.generation, false);
    let off = |_: &HostName| {
        let claim = Claim::Holds { generation, on };
        (claim, vec![known(1, held, 5)])
    };
    site.survey(&[], &off);
    site.starts_on("b");
    assert_eq!(site.images(), [known(1, held, 5)]);
    // Also where the database is read anew.
    let row = serde_json::to_string(site.book.entry(&web()).unwrap()).unwrap();
    let mut again = Book::default();
    again.add_entry(web(), serde_json::from_str(&row).unwrap());
    assert_eq!(again.images(&web()), [known(1, held, 5)]);
}

#[test]
fn who_does_not_hold_the_vm_says_nothing_of_its_images() {
    let mut site = Site::new();
    let held = site.generation.0;
    let invented = [known(9, held, 1 << 40)];
    let (generation, on) = (Generation(held - 1), true);
    for (name, claim) in [
        ("b", site.holds()),
        ("b", Claim::No),
        ("a", Claim::No),
        ("a", Claim::Holds { generation, on }),
    ] {
        site.polled((name, 2), claim, &invented);
        assert_eq!(site.images(), [], "{name}");
    }
    // A state directory of a that was put back.
    site.polled(("a", 1), site.holds(), &invented);
    assert_eq!(site.images(), []);
}

#[test]
fn numbers_that_no_host_reaches_and_generations_to_come_are_not_believed() {
    let mut site = Site::new();
    let held = site.generation.0;
    // From the highest that is believed it can be taken as often again.
    for said in [known(1, held, (1 << 40) + 1), known(1, held + 1, 3)] {
        site.a_says(&[said]);
        assert_eq!(site.images(), []);
    }
    let long = KnownImage {
        disk: "d".repeat(65),
        ..known(1, held, 3)
    };
    site.a_says(&[long]);
    assert_eq!(site.images(), []);
    let many = |from: u128| {
        let many = (from..from + 100).map(|number| KnownImage {
            disk: format!("d{number}"),
            ..known(number, held, 3)
        });
        many.collect::<Vec<_>>()
    };
    for from in [0, 1000] {
        site.a_says(&many(from));
        assert_eq!(site.images(), many(from)[..16]);
    }
}

#[test]
fn an_older_copy_of_what_a_holder_wrote_takes_nothing_back_and_another_image_counts() {
    let mut site = Site::new();
    let held = site.generation.0;
    site.a_says(&[known(1, held, 5)]);
    site.a_says(&[known(1, held, 4)]);
    assert_eq!(site.images(), [known(1, held, 5)]);
    site.a_says(&[]);
    assert_eq!(site.images(), [known(1, held, 5)], "it says nothing");
    // A switch to another image was written, and written back.
    site.a_says(&[known(2, held, 6)]);
    site.a_says(&[known(1, held, 5)]);
    assert_eq!(site.images(), [known(1, held, 5)]);
}

#[test]
fn a_vm_that_is_deleted_leaves_nothing_for_the_next_one_of_its_name() {
    let mut site = Site::new();
    let held = site.generation.0;
    site.a_says(&[known(1, held, 5)]);
    let free = match site.survey(&[], &|_| (Claim::No, Vec::new())) {
        Surveyed::Free(free) => free,
        other => panic!("{other:?}"),
    };
    let deletion = site.book.delete(free).unwrap();
    assert_eq!(site.images(), []);
    site.book.not_deleted(deletion);
    assert_eq!(site.images(), [known(1, held, 5)], "it was not written");
}

#[test]
fn what_a_new_holder_knows_from_before_is_no_news() {
    let mut site = Site::new();
    let first = site.generation.0;
    site.a_says(&[known(1, first, 9)]);
    site.starts_on("b");
    let held = site.generation.0;
    let b_says = |site: &mut Site, said: KnownImage| {
        let claim = site.holds();
        site.polled(("b", 2), claim, &[said]);
        site.images()
    };
    // What it has of when it had the VM once, before it has begun anew.
    assert_eq!(
        b_says(&mut site, known(2, first - 1, 12)),
        [known(1, first, 9)]
    );
    // Somebody opened an older copy since.
    assert_eq!(b_says(&mut site, known(1, held, 5)), [known(1, first, 9)]);
    assert_eq!(b_says(&mut site, known(3, held, 1)), [known(3, held, 1)]);
}

#[test]
fn a_holder_by_hearsay_says_nothing_of_the_images() {
    let mut site = Site::new();
    let (entry, stamp) = (site.book.entry(&web()).unwrap().clone(), site.book.stamp());
    // A copy of the database from before any grant, which learns of the holder from what hosts say.
    let mut book = Book::new(stamp);
    for name in ["a", "b", "c"] {
        book.add_host(enrolled(name), HostRow::default());
    }
    book.add_entry(
        web(),
        Entry {
            holder: Some(host("b")),
            granted: Vec::new(),
            hearsay: true,
            ..entry
        },
    );
    site.book = book;
    let claim = site.holds();
    site.polled(("b", 2), claim, &[known(9, site.generation.0, 1 << 39)]);
    assert_eq!(site.images(), []);
}
