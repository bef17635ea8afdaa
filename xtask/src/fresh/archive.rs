//! Debian's archive, as configured for this machine's apt, and root file systems from it.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

use super::root::Root;
use crate::shell;

/// This machine's additional certificate authorities.
const LOCAL_CERTIFICATES: &str = "usr/local/share/ca-certificates";

/// One line of an apt sources list.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    uri: String,
    /// The release, its updates or its security updates.
    pub suite: String,
}

impl Source {
    /// The line.
    pub fn line(&self) -> String {
        format!("deb {} {} main", self.uri, self.suite)
    }

    /// Another suite of the same archive.
    pub fn other(&self, suite: &str) -> Self {
        Self {
            uri: self.uri.clone(),
            suite: suite.to_owned(),
        }
    }
}

/// The release without updates of its own.
const SID: &str = "sid";

/// The sources of `release`: this machine's Debian sources with the release's name.
pub fn sources(release: &str) -> Vec<Source> {
    let mut list = shell::program("apt-get", "indextargets --format");
    list.args([
        "$(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI)",
        "Created-By: Packages",
    ]);
    let output = list.output().map(|output| output.stdout);
    parse(
        &String::from_utf8_lossy(&output.unwrap_or_default()),
        release,
    )
}

fn parse(listed: &str, release: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in listed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["Debian", codename, "main", uri] = words[..] else {
            continue;
        };
        let suite = match codename.split_once('-') {
            None => release.to_owned(),
            Some(_) if release == SID => continue,
            Some((_, kind @ ("updates" | "security"))) => format!("{release}-{kind}"),
            Some(_) => continue,
        };
        let source = Source {
            uri: uri.to_owned(),
            suite,
        };
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    sources
}

/// Creates a minimal root of the mirror's suite; `None` if the mirror cannot be reached.
pub fn debootstrap(root: &Root, mirror: &Source) -> anyhow::Result<Option<()>> {
    let output = root.output_outside(&[
        "debootstrap",
        "--variant=minbase",
        &mirror.suite,
        &root.path().display().to_string(),
        &mirror.uri,
    ])?;
    let said = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(Some(()));
    }
    if said.contains("Failed getting release file") {
        return Ok(None);
    }
    let last: Vec<&str> = said.lines().rev().take(10).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    bail!("debootstrap: {}\n{}", output.status, last.join("\n"))
}

/// Writes the release's sources and this machine's certificates into the root.
pub fn configure(root: &Root, sources: &[Source]) -> anyhow::Result<()> {
    let list: String = sources.iter().map(|source| source.line() + "\n").collect();
    let path = root.path().join("etc/apt/sources.list");
    fs::write(&path, list).with_context(|| format!("cannot write {}", path.display()))?;
    let (from, to) = (
        Path::new("/").join(LOCAL_CERTIFICATES),
        root.path().join(LOCAL_CERTIFICATES),
    );
    let Ok(certificates) = fs::read_dir(&from) else {
        return Ok(());
    };
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    for certificate in certificates.flatten() {
        let path = certificate.path();
        if path.is_file() {
            fs::copy(&path, to.join(certificate.file_name()))
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debians_sources_are_taken_for_another_release() {
        let listed = "Debian bookworm main http://a.example/debian/\n\
                      Debian bookworm contrib http://a.example/debian/\n\
                      Debian bookworm-updates main http://a.example/debian/\n\
                      Debian bookworm-backports main http://a.example/debian/\n\
                      Debian bookworm-security main http://b.example/security/\n\
                      Other stable main http://c.example/\n\
                      Debian bookworm main http://a.example/debian/\n";
        let found = parse(listed, "trixie");
        let found: Vec<_> = found.iter().map(|s| (&*s.uri, &*s.suite)).collect();
        assert_eq!(
            found,
            [
                ("http://a.example/debian/", "trixie"),
                ("http://a.example/debian/", "trixie-updates"),
                ("http://b.example/security/", "trixie-security"),
            ]
        );
        let of_sid: Vec<_> = parse(listed, SID).into_iter().map(|s| s.suite).collect();
        assert_eq!(of_sid, [SID], "it has neither updates nor security updates");
        assert_eq!(parse("", "trixie"), []);
    }
}
