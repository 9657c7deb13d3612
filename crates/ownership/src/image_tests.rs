//! Who may write an image, by what it says of itself.

use super::*;

struct Site {
    vm: VmName,
    hosts: [HostName; 2],
    fresh: ImageId,
}

impl Site {
    fn new() -> Self {
        Self {
            vm: VmName::new("web").unwrap(),
            hosts: ["a", "b"].map(|name| HostName::new(name).unwrap()),
            fresh: ImageId::new(7),
        }
    }

    fn claim(&self, host: usize, generation: u64) -> ImageClaim<'_> {
        ImageClaim {
            vm: &self.vm,
            disk: "root",
            host: &self.hosts[host],
            generation: Generation(generation),
            known: None,
            anew: true,
            fresh: &self.fresh,
            layered: false,
        }
    }

    /// What an image of id 1 says that was last taken there and then.
    fn taken(&self, host: usize, generation: u64) -> ImageRecord {
        ImageRecord {
            format: IMAGE_RECORD_FORMAT,
            image: ImageId::new(1),
            vm: self.vm.clone(),
            disk: "root".to_owned(),
            holder: self.hosts[host].clone(),
            generation: Generation(generation),
            taken: 5,
        }
    }

    /// The same once it was taken by the next.
    fn taken_then(&self, host: usize, generation: u64) -> ImageRecord {
        ImageRecord {
            taken: 6,
            ..self.taken(host, generation)
        }
    }
}

fn known(image: u128, generation: u64) -> KnownImage {
    KnownImage {
        disk: "root".to_owned(),
        image: ImageId::new(image),
        generation: Generation(generation),
        taken: 5,
    }
}

#[test]
fn an_image_without_a_record_gets_one() {
    let site = Site::new();
    let record = site.claim(0, 3).judge(None).unwrap();
    let wanted = ImageRecord {
        image: ImageId::new(7),
        taken: 1,
        ..site.taken(0, 3)
    };
    assert_eq!(record, wanted);
    // Whoever has it finds it so; the next hypervisor counts.
    let again = ImageClaim {
        anew: false,
        ..site.claim(0, 3)
    };
    assert_eq!(again.judge(Some(&record)), Ok(record.clone()));
    let next = site.claim(0, 3).judge(Some(&record)).unwrap();
    assert_eq!(next, ImageRecord { taken: 2, ..record });
}

#[test]
fn the_later_generation_has_it_and_the_earlier_one_never_again() {
    let site = Site::new();
    let at_b = site.claim(1, 4).judge(Some(&site.taken(0, 3))).unwrap();
    assert_eq!(at_b, site.taken_then(1, 4));
    for late in [3, 4] {
        let refused = site.claim(0, late).judge(Some(&at_b)).unwrap_err();
        let taken_later = ImageRefusal::TakenLater {
            holder: site.hosts[1].clone(),
            theirs: Generation(4),
            ours: Generation(late),
        };
        assert_eq!(refused, taken_later);
    }
    assert_eq!(site.claim(0, 5).judge(Some(&at_b)).unwrap().taken, 7);
}

#[test]
fn an_image_that_was_put_back_from_an_old_copy_is_refused() {
    let site = Site::new();
    let known = known(1, 9);
    let claim = ImageClaim {
        known: Some(&known),
        ..site.claim(0, 10)
    };
    let old = ImageRecord {
        taken: 4,
        ..site.taken(0, 9)
    };
    let older = ImageRefusal::Older { found: 4, known: 5 };
    assert_eq!(claim.judge(Some(&old)), Err(older));
    let newest = claim.judge(Some(&site.taken(0, 9))).unwrap();
    assert_eq!(newest, site.taken_then(0, 10));
    // Another host had it since.
    let newest = claim.judge(Some(&site.taken(1, 9))).unwrap();
    assert_eq!(newest, site.taken_then(0, 10));
}

#[test]
fn a_guest_that_stood_still_does_not_go_on_over_what_another_host_wrote() {
    let site = Site::new();
    let known = known(1, 3);
    let goes_on = |host, generation| ImageClaim {
        known: Some(&known),
        anew: false,
        ..site.claim(host, generation)
    };
    // The other host goes on from where this one stopped.
    let at_b = goes_on(1, 4).judge(Some(&site.taken(0, 3))).unwrap();
    assert_eq!(at_b, site.taken_then(1, 4));
    // A person lets the guest run on here: only one that is started anew reads what was written there.
    let since = ImageRefusal::TakenSince {
        holder: site.hosts[1].clone(),
    };
    assert_eq!(goes_on(0, 5).judge(Some(&at_b)), Err(since));
    assert!(site.claim(0, 5).judge(Some(&at_b)).is_ok());
    // Nor one of an earlier version, which did not write down what it knows.
    let unknown = ImageClaim {
        anew: false,
        ..site.claim(0, 5)
    };
    assert!(unknown.judge(Some(&at_b)).is_err());
}

#[test]
fn a_hypervisor_that_goes_on_under_a_later_generation_is_not_another_opening() {
    let site = Site::new();
    let known = known(1, 3);
    let goes_on = |generation| ImageClaim {
        known: Some(&known),
        anew: false,
        ..site.claim(0, generation)
    };
    let before = site.taken(0, 3);
    let now = goes_on(6).judge(Some(&before)).unwrap();
    assert_eq!(now, site.taken(0, 6));
    // One that asks late takes nothing back.
    assert_eq!(goes_on(4).judge(Some(&now)), Ok(now.clone()));
    // Where its record is gone it is written as it is known; where a person has let it go the guest is started anew.
    assert_eq!(goes_on(6).judge(None), Ok(now));
    assert_eq!(goes_on(6).judge_let_go(), Err(ImageRefusal::LetGo));
    assert!(site.claim(0, 6).judge_let_go().is_ok());
}

#[test]
fn numbers_that_nobody_reaches_are_refused() {
    let site = Site::new();
    let taken = ImageRecord {
        taken: u64::MAX,
        ..site.taken(0, 3)
    };
    for found in [taken, site.taken(0, u64::MAX)] {
        let refused = site.claim(0, 4).judge(Some(&found)).unwrap_err();
        assert_eq!(refused, ImageRefusal::OutOfReach);
    }
}

#[test]
fn an_image_that_the_disk_had_before_is_refused() {
    let site = Site::new();
    let known = known(2, 9);
    let claim = ImageClaim {
        known: Some(&known),
        ..site.claim(0, 9)
    };
    let refused = claim.judge(Some(&site.taken(0, 9))).unwrap_err();
    let former = ImageRefusal::Former {
        found: Generation(9),
    };
    assert_eq!(refused, former);
    // What was taken in its place counts on, also where whoever took it died before it could write down that it knows it.
    let next = claim.judge(None).unwrap();
    assert_eq!(next.taken, 6);
    assert_eq!(claim.judge(Some(&next)).unwrap().taken, 7);
}

#[test]
fn between_vms_of_one_host_its_lock_decides_and_of_another_host_a_person() {
    let site = Site::new();
    let of_other = |host| ImageRecord {
        vm: VmName::new("db").unwrap(),
        ..site.taken(host, 30)
    };
    let taken = site.claim(0, 3).judge(Some(&of_other(0))).unwrap();
    assert_eq!((taken.image, taken.vm), (ImageId::new(7), site.vm.clone()));
    let refused = site.claim(0, 3).judge(Some(&of_other(1))).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "it is disk 'root' of VM 'db', which host 'b' had last"
    );
    // The other VM has written there since this one's guest stood still.
    let goes_on = ImageClaim {
        anew: false,
        ..site.claim(0, 3)
    };
    assert!(goes_on.judge(Some(&of_other(0))).is_err());
}

#[test]
fn a_host_that_begins_anew_takes_what_it_had_itself() {
    let site = Site::new();
    assert_eq!(
        site.claim(0, 1).judge(Some(&site.taken(0, 57))).unwrap(),
        site.taken_then(0, 1)
    );
}

#[test]
fn what_another_version_wrote_is_not_guessed_at() {
    let site = Site::new();
    let record = ImageRecord {
        format: 3,
        ..site.taken(0, 3)
    };
    let refused = site.claim(0, 3).judge(Some(&record)).unwrap_err();
    assert_eq!(refused, ImageRefusal::Format { found: 3 });
}

/// An earlier build reads format 1 alone.
#[test]
fn a_part_of_a_disk_says_so_to_builds_that_know_of_no_parts_until_it_is_all_of_it_again() {
    let site = Site::new();
    let whole = site.taken(0, 3);
    for anew in [true, false] {
        let layered = ImageClaim {
            layered: true,
            anew,
            ..site.claim(0, 3)
        };
        let part = layered.judge(Some(&whole)).unwrap();
        assert_eq!(part.format, LAYERED_RECORD_FORMAT);
        let again = ImageClaim {
            layered: false,
            ..layered
        };
        assert_eq!(
            again.judge(Some(&part)).unwrap().format,
            IMAGE_RECORD_FORMAT
        );
    }
}

#[test]
fn an_id_is_sixteen_bytes_in_hexadecimal() {
    let read = |text: &str| serde_json::from_str::<ImageId>(&format!("\"{text}\""));
    let id = read("000102030405060708090a0b0c0d0e0f").unwrap();
    assert_eq!(id, ImageId::new(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f));
    for wrong in [
        "",
        "00",
        "000102030405060708090A0B0C0D0E0F",
        "000102030405060708090a0b0c0d0e0g",
    ] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn an_image_that_was_taken_under_a_later_generation_is_newer_however_often() {
    let site = Site::new();
    // The disk went along to another host under generation 8, which began to count anew, and onto shared storage there.
    let known = known(1, 3);
    let later = ImageRecord {
        image: ImageId::new(2),
        taken: 1,
        ..site.taken(1, 8)
    };
    assert_eq!(later.must_be_no_older(&known), Ok(()));
    let next = ImageClaim {
        known: Some(&known),
        ..site.claim(0, 9)
    };
    assert_eq!(next.judge(Some(&later)).unwrap().taken, known.taken + 1);
    // And what was taken more often before that is from before.
    let before = ImageRecord {
        image: ImageId::new(2),
        taken: 9,
        ..site.taken(1, 2)
    };
    let former = ImageRefusal::Former {
        found: Generation(2),
    };
    assert_eq!(before.must_be_no_older(&known), Err(former));
}
