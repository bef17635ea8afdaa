//! What runs inside a lab VM: its init process and the parts that watch a system at work.

mod agent;
mod control_page;
mod counters;
mod delay;
mod fault;
mod init;
mod job;
mod kernel;
mod layout;
mod loopback;
mod modules;
mod observer;
mod rivals;
mod rounds;
mod ticker;
mod workload;
mod zones;

pub(crate) use fault::Fault;
pub use init::init;
