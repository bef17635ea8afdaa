//! A file to convert, decompressed if its first bytes show a compressed format.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};

const XZ: &[u8] = b"\xfd7zXZ\0";
const GZIP: &[u8] = b"\x1f\x8b";

/// The input, with the program that decompresses it, if any.
pub struct Source {
    reader: Box<dyn BufRead>,
    decompressor: Option<(&'static str, Child)>,
}

impl Source {
    /// Opens `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let mut file = File::open(path).with_context(cannot)?;
        let mut magic = Vec::new();
        file.by_ref()
            .take(XZ.len() as u64)
            .read_to_end(&mut magic)
            .with_context(cannot)?;
        file.rewind().with_context(cannot)?;
        let program = match &magic[..] {
            magic if magic.starts_with(XZ) => "xz",
            magic if magic.starts_with(GZIP) => "gzip",
            _ => {
                return Ok(Self {
                    reader: Box::new(BufReader::with_capacity(1 << 16, file)),
                    decompressor: None,
                });
            }
        };
        let (child, stdout) = decompress(program, file).with_context(|| {
            format!(
                "cannot run {program}, which {} needs: install it, or decompress the file before",
                path.display()
            )
        })?;
        Ok(Self {
            reader: Box::new(BufReader::with_capacity(1 << 16, stdout)),
            decompressor: Some((program, child)),
        })
    }

    /// The reader of the input.
    pub fn reader(&mut self) -> &mut dyn BufRead {
        &mut *self.reader
    }

    /// Checks that the whole file was decompressed; call it at the end of the input.
    pub fn finish(mut self) -> Result<()> {
        if let Some((program, child)) = &mut self.decompressor {
            let status = child
                .wait()
                .with_context(|| format!("cannot wait for {program}"))?;
            if !status.success() {
                bail!("{program} could not decompress all of the file ({status}); get it again");
            }
        }
        Ok(())
    }
}

fn decompress(program: &str, file: File) -> io::Result<(Child, ChildStdout)> {
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(file)
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    Ok((child, stdout))
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some((_, child)) = &mut self.decompressor {
            // Both fail only if the process has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
