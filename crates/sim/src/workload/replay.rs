//! A recorded program, replayed thread by thread, again and again.
//!
//! The file is read once in whole before, so that what is wrong with it is said at the start, and
//! where each thread's frames lie is known. Then a thread's frames are read as it needs them: a
//! trace of 100 GiB costs 16 bytes for each of its frames.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use demeter_policy::GuestVirtAddr;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, region};
use crate::trace::{Error, Frame, FramePlace, Reader, Span};
use crate::{Access, Batch, Region};

/// Estimated: three instructions a cycle at 3 GHz, as long as memory does not hold them up.
const INSTRUCTION_PS: u64 = 110;

pub(crate) struct Replay {
    reader: Reader<BufReader<File>>,
    spans: Vec<Span>,
    threads: Vec<Thread>,
    access_ps: u64,
    /// The first thing that went wrong since the file was found whole.
    error: Option<Error>,
}

#[derive(Default)]
struct Thread {
    places: Vec<FramePlace>,
    /// The frame that is replayed, and how far.
    frame: Frame,
    next_frame: usize,
    next_access: usize,
    /// The region that was touched last.
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
    /// Reads the frame that comes next; after the last one the first.
    fn advance(&mut self, reader: &mut Reader<BufReader<File>>) -> Result<(), Error> {
        reader.frame_at(self.places[self.next_frame], &mut self.frame)?;
        self.next_frame = (self.next_frame + 1) % self.places.len();
        self.next_access = 0;
        Ok(())
    }

    /// An access of the recorded program at the place that its region has now.
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
                // What is wrong is said at the end; until then something must be done.
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
