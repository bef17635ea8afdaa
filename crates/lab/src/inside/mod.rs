//! What runs inside a lab VM: its init process and the parts that watch a system at work.

mod agent;
mod counters;
mod damon;
mod delay;
mod fault;
mod init;
mod job;
mod modules;
mod observer;
mod pulse;
mod rounds;
mod systems;
mod workload;
mod zones;

pub use init::init;
