//! A minimal KVM virtual machine that runs only our program.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES,
    kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::error::Error;
use crate::guest::{self, LOGGED_AT, SYSTEM_AT, word};
use crate::memory::Memory;
use crate::offer::Offer;
use crate::settings::{Backing, PAGE_BYTES, Protect, Settings};
use crate::stats::{Counters, Stats};

/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`, with 24 bytes.
const KVM_CLEAR_DIRTY_LOG: libc::Ioctl = 0xC018_AEC0_u32 as libc::Ioctl;
const SYSTEM_SLOT: u32 = 0;
const LOGGED_SLOT: u32 = 1;

/// Opens KVM.
pub fn open(root: &Path) -> Result<Kvm, Error> {
    let path = root.join("dev/kvm");
    Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Error::NoKvm(path),
        libc::EACCES | libc::EPERM => Error::Denied(path),
        errno => Error::Call {
            what: "open /dev/kvm",
            source: io::Error::from_raw_os_error(errno),
        },
    })
}

/// State shared by virtual CPUs, sampler and measurement.
pub struct Machine {
    vm: VmFd,
    system: Memory,
    logged: Memory,
    vcpus: u32,
    protect: Protect,
    /// The first virtual CPU that ended unexpectedly, with the reason.
    failed: Mutex<Option<(u32, String)>>,
    clock_khz: u64,
    stats: Vec<Stats>,
}

/// A machine whose virtual CPUs run until this value is dropped.
pub struct Running {
    machine: Arc<Machine>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    /// Creates the machine and starts its virtual CPUs. `filled` gets the filled share of its memory.
    pub fn start(
        kvm: &Kvm,
        offer: &Offer,
        settings: &Settings,
        filled: &dyn Fn(f64) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let vm = kvm.create_vm().map_err(Error::kvm("make a VM"))?;
        enable(&vm, settings)?;
        let logged = Memory::map(settings.memory_bytes(), settings.backing)?;
        logged.fill(filled)?;
        let mut system = Memory::map(guest::system_bytes(settings), Backing::Base)?;
        system.fill(&|_| Ok(()))?;
        guest::load(settings, &mut system);
        set_slot(&vm, SYSTEM_SLOT, SYSTEM_AT, &system, 0)?;
        set_slot(&vm, LOGGED_SLOT, LOGGED_AT, &logged, 0)?;
        let mut stats = vec![];
        if offer.counters {
            stats.push(Stats::of(&vm)?);
        }
        let mut made = vec![];
        for number in 0..settings.vcpus {
            let vcpu = vm
                .create_vcpu(number.into())
                .map_err(Error::kvm("make a virtual CPU"))?;
            guest::prepare(kvm, &vm, &vcpu, settings, number)?;
            if offer.counters {
                stats.push(Stats::of(&vcpu)?);
            }
            made.push(vcpu);
        }
        let machine = Arc::new(Machine {
            clock_khz: guest::clock_khz(&made[0])?,
            vm,
            system,
            logged,
            vcpus: settings.vcpus,
            protect: settings.protect,
            failed: Mutex::new(None),
            stats,
        });
        let mut running = Self {
            machine,
            threads: vec![],
        };
        for (number, vcpu) in (0..).zip(made) {
            let machine = Arc::clone(&running.machine);
            let thread = thread::Builder::new()
                .name(format!("vcpu{number}"))
                .spawn(move || machine.run(number, vcpu))
                .map_err(|source| Error::Call {
                    what: "start a thread",
                    source,
                })?;
            running.threads.push(thread);
        }
        Ok(running)
    }

    /// The shared state.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    /// Stops the virtual CPUs.
    pub fn stop(mut self, limit: Duration) -> Result<(), Error> {
        self.machine.tell_to_stop();
        let deadline = Instant::now() + limit;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if Instant::now() > deadline {
                return Err(Error::Stuck(limit.as_secs()));
            }
            thread::sleep(Duration::from_millis(1));
        }
        for thread in self.threads.drain(..) {
            // A panic was reported already.
            let _ = thread.join();
        }
        self.machine.check()
    }
}

impl Drop for Running {
    /// The virtual CPUs end at their next store; the last one unmaps the memory.
    fn drop(&mut self) {
        self.machine.tell_to_stop();
    }
}

/// Enables the capabilities that the settings need, before memory is added.
fn enable(vm: &VmFd, settings: &Settings) -> Result<(), Error> {
    let manual = match settings.protect {
        Protect::Get => None,
        Protect::Manual => Some(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE),
        Protect::InitiallySet => {
            Some(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET)
        }
    };
    let on = |cap, value| {
        let cap = kvm_enable_cap {
            cap,
            args: [value, 0, 0, 0],
            ..kvm_enable_cap::default()
        };
        vm.enable_cap(&cap)
    };
    if let Some(bits) = manual {
        on(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, bits.into())
            .map_err(Error::kvm("switch manual protection on"))?;
    }
    if let Some(kib) = settings.eager_split_kib {
        on(KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, kib << 10).map_err(Error::kvm(
            "switch eager splitting on with --eager-split-kib",
        ))?;
    }
    Ok(())
}

fn set_slot(vm: &VmFd, slot: u32, at: u64, memory: &Memory, flags: u32) -> Result<(), Error> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: at,
        memory_size: memory.bytes(),
        userspace_addr: memory.address(),
    };
    // SAFETY: the memory stays mapped while `Machine` lives, which owns the VM, too. The guest may write it, and we
    // access it by atomics only.
    unsafe { vm.set_user_memory_region(region) }.map_err(Error::kvm("give the guest memory"))
}

impl Machine {
    /// Main loop of a virtual CPU's thread.
    fn run(&self, number: u32, mut vcpu: VcpuFd) {
        let reason = loop {
            match vcpu.run() {
                Ok(exit) if guest::has_stopped(&exit) && self.is_to_stop(number) => return,
                // A signal for this process, or a debugger stopped the thread.
                Ok(VcpuExit::Intr) => {}
                Ok(exit) => break format!("{exit:?}"),
                Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {
                    // If KVM cannot run the program, it makes no progress.
                    if self.is_to_stop(number) {
                        return;
                    }
                }
                Err(error) => break error.to_string(),
            }
        };
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get_or_insert((number, reason));
    }

    fn is_to_stop(&self, vcpu: u32) -> bool {
        self.word(vcpu, word::STOP).load(Ordering::Relaxed) != 0
    }

    fn tell_to_stop(&self) {
        for vcpu in 0..self.vcpus {
            self.word(vcpu, word::STOP).store(1, Ordering::Relaxed);
        }
    }

    fn word(&self, vcpu: u32, word: u64) -> &AtomicU64 {
        self.system.word(guest::words_at(vcpu) + word)
    }

    /// Checks that all virtual CPUs run.
    pub fn check(&self) -> Result<(), Error> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failed {
            None => Ok(()),
            Some((vcpu, reason)) => Err(Error::Exit {
                vcpu: *vcpu,
                reason: reason.clone(),
            }),
        }
    }

    /// Number of stores of each virtual CPU so far.
    pub fn stores(&self) -> impl Iterator<Item = u64> {
        (0..self.vcpus).map(|vcpu| self.word(vcpu, word::STORES).load(Ordering::Relaxed))
    }

    /// The longest time between two stores of a virtual CPU since the last call, microseconds.
    pub fn take_worst_wait_us(&self) -> f64 {
        // The guest may write back a longer wait that it has just compared. It then counts once more.
        let waits =
            (0..self.vcpus).map(|vcpu| self.word(vcpu, word::WAIT).swap(0, Ordering::Relaxed));
        waits.max().unwrap_or(0) as f64 * 1000.0 / self.clock_khz as f64
    }

    /// KVM's counters, summed over virtual CPUs.
    pub fn counters(&self) -> Counters {
        let mut totals = Counters::new();
        for stats in &self.stats {
            stats.add_to(&mut totals);
        }
        totals
    }

    /// Enables or disables logging.
    pub fn log(&self, on: bool) -> Result<(), Error> {
        let flags = if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        set_slot(&self.vm, LOGGED_SLOT, LOGGED_AT, &self.logged, flags)
    }

    /// Reads the log.
    pub fn read_log(&self) -> Result<Vec<u64>, Error> {
        self.vm
            .get_dirty_log(LOGGED_SLOT, self.logged.bytes() as usize)
            .map_err(Error::kvm("read the log of dirty pages"))
    }

    /// Clears the dirty pages of a part of the log; `bitmap` covers the whole log.
    pub fn clear_log(&self, bitmap: &mut [u64], first: u64, pages: u32) -> Result<(), Error> {
        assert!(self.protect != Protect::Get, "reading has cleared it");
        assert!(
            first.is_multiple_of(64)
                && first + u64::from(pages) <= self.logged.bytes() / PAGE_BYTES
        );
        let words = &mut bitmap[(first / 64) as usize..][..(pages as usize).div_ceil(64)];
        let mut clear = kvm_clear_dirty_log {
            slot: LOGGED_SLOT,
            num_pages: pages,
            first_page: first,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                dirty_bitmap: words.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the kernel reads a bit for each of `pages` pages, which `words` contains; both outlive the call.
        match unsafe { libc::ioctl(self.vm.as_raw_fd(), KVM_CLEAR_DIRTY_LOG, &raw mut clear) } {
            0 => Ok(()),
            _ => Err(Error::last("clear the log of dirty pages")),
        }
    }
}
