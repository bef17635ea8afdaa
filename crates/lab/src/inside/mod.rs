//! What runs beside the workload: a lab VM's init process, and the parts that watch a system at work,
//! in a VM and on this machine ([`Testbed`]).

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
pub(crate) mod testbed;
mod ticker;
mod workload;
mod zones;

pub(crate) use fault::Fault;
pub use init::init;
