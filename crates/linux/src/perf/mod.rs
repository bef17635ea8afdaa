//! perf events: the system calls, and the rings that the kernel writes.

pub mod ring;
pub mod sys;
