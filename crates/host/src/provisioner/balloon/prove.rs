//! The proof that an agent runs in the VM whose memory would be punched.

use std::io;

use demeter_policy::{ByteCount, PAGE_SIZE, PhysRange, Tier};
use demeter_proto::{Message, Nonce};
use rustix::rand::{GetRandomFlags, getrandom};

use super::Guest;
use super::answers::{fulfilled, hostile};
use super::named::is_plugged;
use crate::backing::Backing;
use crate::provisioner::ProvisionError;

impl<B: Backing> Guest<B> {
    /// Proves that the agent runs in this VM: its driver shows a fresh nonce in the file that would
    /// be punched. The guest's data is not used before that.
    pub(super) async fn prove(&mut self, tier: Tier) -> Result<(), ProvisionError> {
        let node = *self.nodes.get(tier);
        let nonce = nonce().map_err(|source| ProvisionError::Backing { tier, source })?;
        let question = |request| Message::Prove {
            request,
            node,
            nonce,
        };
        let mut answers = self.agent.ask(question).await?;
        let page = match answers.next().await? {
            Message::Proof { page, node: of, .. } if of == node => page,
            Message::Done(done) => {
                fulfilled(done.outcome, done.reason)?;
                return Err(ProvisionError::Refused(ELSEWHERE.into()));
            }
            _ => return Err(hostile("it answers what it was not asked")),
        };
        let page = PhysRange::new(page, ByteCount(PAGE_SIZE))
            .filter(|page| page.start().0.is_multiple_of(PAGE_SIZE));
        let read = match page {
            Some(page) => self.read_page(tier, page).await,
            None => Ok(None),
        };
        match read.map_err(|source| ProvisionError::Backing { tier, source })? {
            Some(found) if Nonce(found) == nonce => Ok(()),
            // Another VM or a proxy may have answered, so this guest is not marked.
            _ => Err(ProvisionError::Refused(ELSEWHERE.into())),
        }
    }

    /// The beginning of a page in the VM's memory of `tier`; `None` if there is no such page.
    async fn read_page(&self, tier: Tier, page: PhysRange) -> io::Result<Option<[u8; 16]>> {
        let backing = self.backing.clone();
        let outside = self.agent.outside();
        let reading = outside.ask("reading the VM's memory", move |wait| {
            let mut found = [0; 16];
            match backing.resolve(tier, page) {
                Ok(extent) => backing.read(extent, &mut found, wait)?,
                Err(_) if is_plugged(page, backing.plugged()) => {
                    backing.read_plugged(page.start(), &mut found, wait)?;
                }
                Err(_) => return Ok(None),
            }
            Ok(Some(found))
        });
        reading.await?
    }
}

/// Error for an agent that cannot show a nonce in this VM's memory.
const ELSEWHERE: &str = "the agent does not speak for this VM: it could not show a nonce in the VM's \
                         memory; check that `agent` and `qmp` in the configuration are sockets of the \
                         same VM";

/// A random nonce.
fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += getrandom(&mut nonce[filled..], GetRandomFlags::empty())?;
    }
    Ok(Nonce(nonce))
}
