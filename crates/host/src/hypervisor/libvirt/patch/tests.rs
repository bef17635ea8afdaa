use super::*;

const BALLOON: Wanted = Wanted {
    provisioner: ProvisionerKind::DemeterBalloon,
    fast: None,
    slow: None,
    cells: None,
    host: None,
};
const ELASTIC: Wanted = Wanted {
    provisioner: ProvisionerKind::VirtioMem,
    fast: Some(ByteCount(100 * MIB)),
    ..BALLOON
};

fn domain(middle: &str, devices: &str) -> String {
    format!(
        "<domain type='qemu'>\n  <name>db</name>\n  <memory unit='KiB'>409600</memory>\n  \
             <vcpu>4</vcpu>\n{middle}  <devices>\n{devices}  </devices>\n</domain>\n"
    )
}

#[test]
fn whatever_is_there_becomes_a_domain_that_lacks_nothing() {
    let cells = "<numa><cell id='0' cpus='0-3' memory='100' unit='MiB'/><cell id='1' \
                     memory='300' unit='MiB' memAccess='private'/></numa>";
    for (middle, devices) in [
        ("", ""),
        ("  <cpu mode='host-model'/>\n", ""),
        (
            "  <cpu mode='host-model'>\n  <topology sockets='1'/>\n  </cpu>\n",
            "",
        ),
        (
            "  <cpu><numa><cell id='0' memory='409600'/></numa></cpu>\n",
            "",
        ),
        (
            "  <cpu><numa><cell id='0' memory='409600' memAccess='private'/></numa></cpu>\n",
            "",
        ),
        (&format!("  <cpu>{cells}</cpu>\n"), ""),
        (
            "  <memoryBacking>\n    <hugepages/>\n    <nosharepages/>\n  </memoryBacking>\n",
            "    <channel type='unix'><target type='virtio' name='org.demeter.0'/></channel>\n",
        ),
    ] {
        let xml = domain(middle, devices);
        for wanted in [BALLOON, ELASTIC] {
            let new = mended(&xml, wanted).unwrap().xml;
            let facts = Facts::read(&new).unwrap();
            let tiers = facts.tiers().unwrap();
            facts.check(wanted.provisioner, tiers).unwrap();
            let all: u64 = facts.cells.iter().map(|cell| cell.size.0).sum();
            assert_eq!(all, 400 * MIB, "{new}");
            assert_eq!(facts.cells[0].size, ByteCount(100 * MIB), "{new}");
            assert!(!new.contains("hugepages") || wanted == ELASTIC);
            assert_eq!(new.contains("nosharepages"), xml.contains("nosharepages"));
            assert_eq!(
                mended(&new, wanted).unwrap().xml,
                new,
                "nothing is left to mend"
            );
            assert_eq!(patch("db", &new, wanted).unwrap().diff, None);
            let diff = patch("db", &xml, wanted).unwrap().diff.unwrap();
            assert!(diff.starts_with("--- db.xml\n+++ db.xml\n@@ "), "{diff}");
        }
    }
}

#[test]
fn what_cannot_be_mended_is_told() {
    let all = Wanted {
        fast: Some(ByteCount(400 * MIB)),
        ..BALLOON
    };
    for (xml, wanted, want) in [
        ("<domain", BALLOON, "cannot be read"),
        ("<domain a='1'/\n<domain/>", BALLOON, "cannot be read"),
        ("<network/>", BALLOON, "no domain"),
        ("<domain/>", BALLOON, "no <devices>"),
        ("<domain><devices/></domain>", BALLOON, "no <memory>"),
        (&domain("", "").replace("vcpu", "x"), BALLOON, "no <vcpu>"),
        (&domain("", ""), all, "--fast-mib"),
        (
            "<!DOCTYPE d [<!ENTITY a 'x'>]><domain>&a;</domain>",
            BALLOON,
            "cannot be read",
        ),
    ] {
        let said = patch("db", xml, wanted).unwrap_err();
        assert!(said.contains(want), "{want}: {said}");
        assert_eq!(said.lines().count(), 1);
    }
}

#[test]
fn a_confidential_domain_gets_no_patch() {
    let security = "<launchSecurity type='sev-snp'><policy>0x30000</policy></launchSecurity>\n";
    let said = patch("db", &domain(security, ""), BALLOON).unwrap_err();
    assert!(said.contains("a confidential VM (sev-snp)"), "{said}");
    assert!(said.contains("run demeter guest in it"), "{said}");
}

#[test]
fn why_a_domain_cannot_be_sized_is_told() {
    let cell = |node, access| format!("<cell id='{node}' memory='1' memAccess='{access}'/>");
    let with = |cells: &str, devices: &str| {
        Facts::read(&domain(
            &format!("<cpu><numa>{cells}</numa></cpu>\n"),
            devices,
        ))
        .unwrap()
    };
    let shared = cell(0, "shared") + &cell(1, "shared");
    let balloon = ProvisionerKind::DemeterBalloon;
    for (cells, kind, want) in [
        (cell(0, "shared"), balloon, "no NUMA cell 1"),
        (
            cell(0, "shared") + &cell(1, "private"),
            balloon,
            "cell 1 has private memory",
        ),
        (shared.clone(), balloon, "no channel org.demeter.0"),
        (shared.clone(), ProvisionerKind::VirtioMem, "no virtio-mem"),
    ] {
        let said = with(&cells, "").check(kind, NODES).unwrap_err().to_string();
        assert!(said.contains(want), "{want}: {said}");
    }
    let facts = with(
        &shared,
        "<channel type='unix'><source mode='bind' path='/run/c'/><target name='org.demeter.0'/></channel>",
    );
    assert_eq!(facts.check(balloon, NODES), Ok(()));
    assert_eq!(facts.agent, Some("/run/c".into()));
    assert!(!facts.running);
    assert!(Facts::read("<domain><cpu><numa><cell memory='x'/></numa></cpu></domain>").is_err());
}

fn notes(xml: &str, wanted: Wanted) -> String {
    patch("db", xml, wanted).unwrap().notes.join("\n")
}

#[test]
fn what_is_taken_away_is_told_with_the_reason() {
    let huge = "  <memoryBacking>\n    <hugepages>\n      <page size='1' unit='GiB'/>\n    </hugepages>\n    \
                    <source type='file'/>\n  </memoryBacking>\n";
    let said = notes(&domain(huge, ""), BALLOON);
    assert!(
        said.contains("takes away <hugepages> <page size='1' unit='GiB'/> </hugepages>: "),
        "{said}"
    );
    assert!(
        said.contains("SIGBUS") && said.contains("takes away <source type='file'/>"),
        "{said}"
    );
    assert!(!notes(&domain("", ""), BALLOON).contains("takes away"));
    assert!(notes(&domain("", ""), BALLOON).contains("100 MiB and a slow one of 300 MiB"));
    let more = Wanted {
        slow: Some(ByteCount(400 * MIB)),
        ..BALLOON
    };
    let new = mended(&domain("", ""), more).unwrap().xml;
    assert!(new.contains("<cell id='1' memory='409600'"), "{new}");
}

#[test]
fn which_cell_is_which_is_asked_where_it_is_not_plain() {
    let cell =
        |id, cpus: &str| format!("<cell id='{id}' {cpus} memory='102400' memAccess='shared'/>");
    let numa = |cells: String| format!("  <cpu><numa>{cells}</numa></cpu>\n");
    let four: String = (0..4).map(|id| cell(id, &format!("cpus='{id}'"))).collect();
    let xml = domain(&numa(four), "");
    let said = patch("db", &xml, BALLOON).unwrap_err();
    assert!(said.contains("4 NUMA cells, 4 of them with CPUs"), "{said}");
    assert!(said.contains("--fast-cell"), "{said}");
    let cells = Some(PerTier {
        fast: NodeId(2),
        slow: NodeId(3),
    });
    let chosen = Wanted { cells, ..BALLOON };
    assert!(notes(&xml, chosen).contains("fast.node = 2 and slow.node = 3"));
    let none = Some(PerTier {
        fast: NodeId(2),
        slow: NodeId(7),
    });
    let said = patch(
        "db",
        &xml,
        Wanted {
            cells: none,
            ..BALLOON
        },
    )
    .unwrap_err();
    assert!(said.contains("no NUMA cell 7"), "{said}");
    // The cell with CPUs is fast.
    let turned = numa(cell(0, "") + &cell(1, "cpus='0-3'"));
    assert!(notes(&domain(&turned, ""), BALLOON).contains("fast.node = 1 and slow.node = 0"));
}

#[test]
fn cells_are_bound_to_the_hosts_tiers_and_the_guest_is_told_how_fast_they_are() {
    let tier = |node, latency_ns| HostTier {
        node: NodeId(node),
        speed: Some(Speed {
            latency_ns,
            bandwidth_mb_s: 102_400,
        }),
    };
    let host = Some(PerTier {
        fast: tier(0, 80),
        slow: tier(2, 250),
    });
    let wanted = Wanted { host, ..BALLOON };
    for (middle, kept) in [
        ("", ""),
        ("  <numatune/>\n", ""),
        (
            "  <numatune>\n    <memory mode='strict' nodeset='0,2'/>\n  </numatune>\n",
            "<memory mode='strict' nodeset='0,2'/>",
        ),
    ] {
        let new = mended(&domain(middle, ""), wanted).unwrap().xml;
        for want in [
            "<memnode cellid='0' mode='strict' nodeset='0'/>",
            "<memnode cellid='1' mode='strict' nodeset='2'/>",
            "<latency initiator='0' target='1' type='access' value='250'/>",
            "<bandwidth initiator='0' target='0' type='access' value='100000000' unit='KiB'/>",
            kept,
        ] {
            assert!(new.contains(want), "{want} is not in\n{new}");
        }
        assert_eq!(new.matches("<numatune").count(), 1);
        assert_eq!(
            mended(&new, wanted).unwrap().xml,
            new,
            "nothing is left to mend"
        );
    }
    let auto = "  <numatune><memory placement='auto'/></numatune>\n";
    assert!(
        patch("db", &domain(auto, ""), wanted)
            .unwrap_err()
            .contains("placement")
    );
    assert!(notes(&domain("", ""), BALLOON).contains("not bound"));
}
