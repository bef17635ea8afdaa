//! The picture of `--svg`: how fast programs are with fast memory of several sizes.

use std::path::Path;

/// The speed of a VM or a program at each size.
#[cfg_attr(
    not(feature = "study"),
    allow(dead_code, reason = "only a picture reads it")
)]
pub struct Speeds {
    /// Its name.
    pub name: String,
    /// Lower and upper bound at each size, percent of the speed with fast memory alone.
    pub bounds_percent: Vec<(f64, f64)>,
}

/// Writes a picture of speeds at these sizes, which are in percent of the memory that is used.
#[cfg(feature = "study")]
pub fn draw(file: &Path, sizes_percent: &[u64], all: Vec<Speeds>) -> anyhow::Result<()> {
    let all: Vec<_> = all
        .into_iter()
        .map(|of| demeter_report::Speeds {
            name: of.name,
            bounds_percent: of.bounds_percent,
        })
        .collect();
    let sizes: Vec<_> = sizes_percent.iter().map(|&size| size as f64).collect();
    let svg = demeter_report::speeds_svg(&sizes, &all);
    Ok(demeter_outcome::write_file(file, svg.as_bytes())?)
}

/// Draws nothing: [`check`] has refused the picture.
#[cfg(not(feature = "study"))]
pub fn draw(file: &Path, _: &[u64], _: Vec<Speeds>) -> anyhow::Result<()> {
    check(Some(file))
}

/// Refuses a picture where none can be drawn, and says which package draws it. For use before a long observation.
pub fn check(svg: Option<&Path>) -> anyhow::Result<()> {
    if cfg!(feature = "study") || svg.is_none() {
        return Ok(());
    }
    anyhow::bail!(
        "--svg needs the pictures of demeter report, which are not in this package; install demeter-lab"
    )
}
