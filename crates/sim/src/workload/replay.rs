//! Replay of a recorded program, thread by thread, in an endless loop.
//!
//! The whole file is read once in advance, to report errors at the start and to index each thread's frames. Frames are
//! then read on demand: a trace of 100 GiB needs 16 bytes per frame.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use demeter_policy::GuestVirtAddr;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, region};
use crate::trace::{Error, Frame, FramePlace, Reader, Span};
use crate::{Access, Batch, Region};

/// Estimated: three instructions per cycle at 3 GHz, unless memory stalls them.
const INSTRUCTION_PS: u64 = 110;

pub(crate) struct Replay {
    reader: Reader<BufReader<File>>,
    spans: Vec<Span>,
    threads: Vec<Thread>,
    access_ps: u64,
    /// The first error since the file was validated.
    error: Option<Error>,
}

#[derive(Default)]
struct Thread {
    places: Vec<FramePlace>,
    /// The current frame, and the position in it.
    frame: Frame,
    next_frame: usize,
    next_access: usize,
    /// The region of the last access.
    span: usize,
}

impl Replay {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let mut reader = Reader::open(path)?;
        let mut threads = Vec::new();
        threads.resize_with(reader.header().threads.into(), Thread::default);
        let (mut accesses, mut instructions) = (0u64, 0u64);
        let mut frame = Frame::default();
        while let Some(place) = reader.next_frame(&mut frame)? {
            threads[usize::from(frame.thread)].places.push(place);
            accesses += frame.accesses.len() as u64;
            instructions = instructions.saturating_add(frame.instructions);
        }
        threads.retain(|thread| !thread.places.is_empty());
        if threads.is_empty() {
            return Err(Error::Empty { path: path.into() });
        }
        Ok(Self {
            spans: reader.header().regions.clone(),
            reader,
            threads,
            access_ps: instructions.saturating_mul(INSTRUCTION_PS) / accesses,
            error: None,
        })
    }
}

impl Thread {
    /// Reads the next frame; after the last one, the first.
    fn advance(&mut self, reader: &mut Reader<BufReader<File>>) -> Result<(), Error> {
        reader.frame_at(self.places[self.next_frame], &mut self.frame)?;
        self.next_frame = (self.next_frame + 1) % self.places.len();
        self.next_access = 0;
        Ok(())
    }

    /// Translates an access to the current address of its region.
    #[inline]
    fn moved(&mut self, access: Access, spans: &[Span], memory: &ProgramMemory) -> Access {
        let gva = access.gva().0;
        let holds = |span: &Span| gva.wrapping_sub(span.base.0) < span.bytes;
        if !holds(&spans[self.span]) {
            self.span = spans.partition_point(|span| span.base.0 <= gva).max(1) - 1;
        }
        let gva = GuestVirtAddr(memory.base(self.span) + (gva - spans[self.span].base.0));
        if access.is_store() {
            Access::store(gva)
        } else {
            Access::load(gva)
        }
    }
}

impl Generator for Replay {
    fn regions(&self) -> Vec<Region> {
        let named = |span: &Span| region(&format!("{:#x}", span.base.0), span.bytes);
        self.spans.iter().map(named).collect()
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let thread = &mut self.threads[thread];
        while out.room() > 0 {
            if thread.next_access == thread.frame.accesses.len()
                && let Err(error) = thread.advance(&mut self.reader)
            {
                // The error is reported at the end; until then the thread needs some access.
                thread.frame.accesses.clear();
                thread.next_access = 0;
                self.error.get_or_insert(error);
                out.push(Access::load(GuestVirtAddr(memory.base(0))));
                return;
            }
            let left = &thread.frame.accesses[thread.next_access..];
            let count = left.len().min(out.room());
            for index in thread.next_access..thread.next_access + count {
                let access = thread.frame.accesses[index];
                out.push(thread.moved(access, &self.spans, memory));
            }
            thread.next_access += count;
            out.ops += count as u32;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        Vec::new()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        self.access_ps
    }

    fn fault(&self) -> Option<String> {
        self.error.as_ref().map(Error::to_string)
    }
}
