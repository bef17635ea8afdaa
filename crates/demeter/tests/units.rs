//! Tests that the packages' systemd units have no unnecessary rights.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

/// Maximum exposure by `systemd-analyze security`, in tenths.
const EXPOSURE_MAX: u32 = 25;

#[test]
fn no_unit_is_more_exposed_than_it_must_be() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let mut units = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let unit = entry.unwrap().path();
        if unit
            .extension()
            .is_none_or(|extension| extension != "service")
        {
            continue;
        }
        units += 1;
        let analysed = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            .arg(format!("--threshold={EXPOSURE_MAX}"))
            .arg(&unit)
            .output();
        let analysed = match analysed {
            Ok(analysed) => analysed,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return eprintln!("skipped: systemd-analyze is not installed");
            }
            Err(error) => panic!("{error}"),
        };
        let errors = String::from_utf8_lossy(&analysed.stderr);
        if errors.contains("unrecognized option") {
            return eprintln!("skipped: systemd is older than 250, which looks at files");
        }
        let said = String::from_utf8_lossy(&analysed.stdout);
        let verdict = said.lines().rfind(|line| line.contains("exposure level"));
        assert!(
            analysed.status.success(),
            "{}: {verdict:?} {errors}",
            unit.display()
        );
    }
    assert_eq!(units, 3);
}
