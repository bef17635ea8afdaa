use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use demeter_policy::MIB;

use super::super::file::{Kind, MemoryFile};
use super::*;
use crate::hypervisor::qemu::Qemu;
use crate::testing::FakeVm;

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(4 * MIB),
    slow: ByteCount(8 * MIB),
};

fn vm() -> FakeVm {
    FakeVm::new(SIZE)
}

async fn find(
    vm: &FakeVm,
    name: &str,
    memdev: &PerTier<String>,
    host: &HostFiles,
) -> Result<LiveBacking<Qemu>, String> {
    let connection = vm.connect().await;
    let found = LiveBacking::find(host, &Outside::default(), name, &connection, memdev).await;
    found.map_err(|error| error.to_string())
}

fn range(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap()
}

#[tokio::test]
async fn what_the_guest_names_is_what_is_punched() {
    let vm = vm();
    let host = HostFiles::default();
    let wait = MayWait::in_a_test();
    let backing = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap();
    assert_eq!(backing.size(Tier::Slow), ByteCount(8 * MIB));
    // The second half of slow memory lies above a hole.
    let high = range((4 << 30) + MIB, MIB);
    let extent = backing.resolve(Tier::Slow, high).unwrap();
    assert_eq!(extent.offset.0, 5 * MIB);
    backing.punch(extent, &wait).unwrap();
    assert_eq!(
        backing.backed(Tier::Slow, &wait).unwrap(),
        ByteCount(7 * MIB)
    );
    assert_eq!(
        backing.backed(Tier::Fast, &wait).unwrap(),
        ByteCount(4 * MIB)
    );
    let mut read = vec![0; 8 * MIB as usize];
    vm.file(Tier::Slow).read_exact_at(&mut read, 0).unwrap();
    let hole = 5 * MIB as usize..6 * MIB as usize;
    let zero = |at: usize| hole.contains(&at);
    assert!((0..read.len()).all(|at| (read[at] == 0) == zero(at)));

    for (tier, range) in [
        (Tier::Fast, high),
        (Tier::Slow, range(0, MIB)),
        (Tier::Slow, range(7 * MIB, 2 * MIB)),
        (Tier::Slow, range(8 * MIB, MIB)),
        (Tier::Fast, range(3 * MIB, 2 * MIB)),
        (Tier::Slow, range(u64::MAX - MIB, MIB)),
    ] {
        assert!(backing.resolve(tier, range).is_err(), "{tier} {range}");
    }
}

#[tokio::test]
async fn what_was_plugged_in_is_known_and_of_no_tier() {
    let vm = vm();
    let dimm = range(1 << 33, 2 * MIB);
    vm.state().dimm = Some(dimm);
    let host = HostFiles::default();
    let backing = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap();
    assert!(backing.plugged().contains(&dimm));
    assert!(backing.resolve(Tier::Fast, dimm).is_err());
    let wait = MayWait::in_a_test();
    // This double maps the fast tier's memory there.
    vm.file(Tier::Fast).write_all_at(b"proof", MIB).unwrap();
    let mut read = [0; 5];
    let at = GuestPhysAddr(dimm.start().0 + MIB);
    backing.read_plugged(at, &mut read, &wait).unwrap();
    assert_eq!(&read, b"proof");
    assert!(backing.read_plugged(dimm.end(), &mut read, &wait).is_err());
}

#[tokio::test]
async fn no_file_is_two_vms_memory() {
    let vm = vm();
    let host = HostFiles::default();
    let connection = vm.connect().await;
    let memdev = FakeVm::memdev();
    let outside = Outside::default();
    let find = |name| LiveBacking::find(&host, &outside, name, &connection, &memdev);
    let first = find("a").await.unwrap();
    let said = find("b").await.unwrap_err().to_string();
    assert!(said.contains("fast memory of VM a already"), "{said}");
    drop(first);
    find("b").await.unwrap();
}

#[tokio::test]
async fn memory_that_will_not_do_is_named_with_the_hint() {
    let host = HostFiles::default();
    let memdev = |fast: &str| PerTier {
        fast: fast.into(),
        slow: "node1".into(),
    };
    let said = find(&vm(), "a", &memdev("m9"), &host).await.unwrap_err();
    assert!(
        said.contains("\"m9\"") && said.contains("there are: node0, node1"),
        "{said}"
    );
    let said = find(&vm(), "a", &memdev("node1"), &host).await.unwrap_err();
    assert!(
        said.contains("slow memory of VM a") || said.contains("fast memory of VM a"),
        "{said}"
    );
    let private = vm();
    private.state().private = true;
    let said = find(&private, "a", &FakeVm::memdev(), &host)
        .await
        .unwrap_err();
    assert!(said.contains("share=on"), "{said}");
    let read_only = vm();
    read_only.state().protect(Tier::Fast);
    let said = find(&read_only, "a", &FakeVm::memdev(), &host)
        .await
        .unwrap_err();
    assert!(said.contains("may only read it"), "{said}");
    let pinned = vm();
    pinned.state().pinned = true;
    let said = find(&pinned, "a", &FakeVm::memdev(), &host)
        .await
        .unwrap_err();
    assert!(said.contains("\"gpu0\""), "{said}");
}

#[tokio::test]
async fn huge_pages_that_are_set_aside_are_refused() {
    // An empty file needs no huge page.
    let huge = match rustix::fs::memfd_create("huge", rustix::fs::MemfdFlags::HUGETLB) {
        Ok(file) => fs::File::from(file),
        Err(error) => return eprintln!("skipped: no hugetlb memfd here: {error}"),
    };
    let vm = vm();
    vm.state().back_by(Tier::Fast, huge);
    let host = HostFiles::default();
    let said = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap_err();
    assert!(said.contains("hugetlbfs"), "{said}");
}

#[tokio::test]
async fn a_file_on_disk_is_memory_only_where_the_operator_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk = FakeVm::new(SIZE);
    let path = folder.path().join("memory");
    on_disk.state().replace_file(Tier::Fast, &path);
    let find_with = async |paths: &[&Path]| {
        let host = HostFiles {
            memory_paths: paths.iter().map(|path| path.to_path_buf()).collect(),
            ..HostFiles::default()
        };
        find(&on_disk, "a", &FakeVm::memdev(), &host).await
    };
    if fstatfs_is_memory(folder.path()) {
        eprintln!("skipped: {} lies in memory", folder.path().display());
        return;
    }
    for wrong in [
        &[][..],
        &[Path::new("/nonexistent")],
        &[&path.with_extension("x")],
    ] {
        let said = find_with(wrong).await.unwrap_err();
        assert!(said.contains("memory_paths"), "{said}");
    }
    find_with(&[folder.path()]).await.unwrap();
    // A deleted file has no path, so it lies in no folder.
    fs::remove_file(&path).unwrap();
    assert!(find_with(&[folder.path()]).await.is_err());
}

fn fstatfs_is_memory(path: &Path) -> bool {
    MemoryFile::new(fs::File::open(path).unwrap(), &MayWait::in_a_test())
        .unwrap()
        .kind()
        == Kind::Memory
}

#[tokio::test]
async fn a_memory_beyond_all_bounds_is_refused() {
    let host = HostFiles::default();
    let vm = vm();
    vm.state().claims = Some(ByteCount(u64::MAX));
    let said = find(&vm, "a", &FakeVm::memdev(), &host).await.unwrap_err();
    assert!(said.contains("at the most"), "{said}");
}
